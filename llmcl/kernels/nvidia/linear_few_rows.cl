// Y = X W^T for the few tokens of a step, at most MAX_ROWS, on the matrix units of NVIDIA GPUs (sm_80 and later): each weight is
// read once, at memory speed.
// Formula and arguments as in cpu/linear_prefill.cl, except for x: OPERAND in blocks of 8 x 8 (`pack_activations`). Operands have
// 16 bits, sums are float32. With PACKED_OUT the output is OUT in the same layout, the next product's input.
//
// A norm between two products is split over both. With LEAVES the first product adds to the residual, and also leaves x times the
// norm's weights in `normed`, and the sum of squares of each 16 values of x in `squares`. With SCALED the second product reads the
// rows in `normed`, and multiplies its sums by 1 / sqrt(mean of squares + EPS).
//
//   norm     float [OUT_STRIDE], weights        normed  OUT [ceil(n/8)][OUT_STRIDE/8][8][8]
//   squares  float [n][OUT_STRIDE/16]; for x, with SCALED: [n][K/16]
//
// The weights are the 16-row operand, 8 tokens are the columns of the other operand. A work-group takes TILES tiles, a warp every
// WARPS-th piece of 32 columns. Among the 16 TILES rows, lane (g, t) = (lane / 4, lane % 4) has 2 TILES neighbouring rows, from 2
// TILES g on; the pieces' file defines the lane's columns in a piece. Rows and columns may be combined freely in a product, as long
// as the activations' columns agree.
//
//     columns, in pieces of 32:    warp 0 | warp 1 | .. | warp WARPS-1 | warp 0 | ..
//
// A warp copies its pieces of weights and activations into local memory ahead of time, DEPTH pieces each into one of STAGES stages,
// and waits for no other warp. At the end the warps' sums are added in warp order: a token's results are bit-identical for any
// MAX_ROWS and n.
//
// With CHAINED the file is the function `few_rows_unit` in nvidia/few_rows_chain.cl: other groups in the launch have written x,
// squares and y. With X_PARTS (1) there are X_PARTS counters for equal parts of x's columns, one after the other: a warp only waits
// for a part when it needs it, and begins before all of x has arrived. With K_PARTS (1) several groups share the columns, and each
// group reads less of x: the first group adds its sums to y, the others leave their sums in `squares`, float
// [K_PARTS - 1][MAX_ROWS][OUT_STRIDE], for the following norm. With MEETS (0) the others leave their sums in `meeting`, and the
// last group, which began last, adds all sums in part order: to y, and with LEAVES for the next product. With FIRST_STEPS the first
// of two parts has FIRST_STEPS steps, STEP_PIECES pieces each, of the total.
//
//   meeting  float4 [groups' rows and 8 tokens][K_PARTS - 1][TILES][lanes], sums; ABSENT words before and after
//
// With EXPERTS the file is the base of nvidia/experts_few_rows.cl: the tokens belong to a block, and their rows may lie
// anywhere. A group then takes one block after the other, and requests the next block's first pieces during the last products of
// a block.
//
// Index space: ceil(N_TILES / TILES) groups with 32 WARPS work-items; K_PARTS times as many with K_PARTS, the first parts first.
// Build: WEIGHT, K (a multiple of 32), N, N_TILES, OUT_STRIDE, EPILOGUE, MAX_ROWS (a multiple of 8), TILES (1, 2 or 4; with a gate
// 2 or 4), WARPS, STAGES (3 or more), DEPTH, PACKED_OUT (OUT_STRIDE a multiple of 32, EPILOGUE not "add") and LEAVES (OUT_STRIDE a
// multiple of 32, EPILOGUE "add"), OUT with either, SCALED, and EPS with SCALED. x, and out with PACKED_OUT, have tokens up to a
// multiple of 8; rows past n may hold anything.
// Local memory: LOCAL_BYTES and 4 MAX_ROWS.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(OUT_STRIDE) || !defined(EPILOGUE) || \
    !defined(MAX_ROWS) || !defined(TILES) || !defined(WARPS) || !defined(STAGES) || !defined(DEPTH) ||                   \
    !defined(PACKED_OUT) || !defined(LEAVES) || !defined(SCALED) || (!defined(STATE_N_TOKENS) && !EXPERTS)
#error "nvidia/linear_few_rows.cl needs the build constants named in its head"
#endif
#include "common/tiles.cl"
#include "nvidia/ptx.cl"
#define SCALES_AFTER WEIGHT_IS(mxfp4)  // for a row's 32 columns, because the product only sees the codes
#if QUANTIZED
#include "nvidia/few_rows_quantized.cl"
#else
#include "nvidia/few_rows_16_bit.cl"
#endif

#ifndef EXPERTS
#define EXPERTS 0
#endif
#define BLOCKS (MAX_ROWS / 8)
#ifndef K_PARTS
#define K_PARTS 1
#endif
#ifndef MEETS
#define MEETS 0
#endif
#define PIECES (K / 32 / K_PARTS)  // per group
#define STEP_PIECES (WARPS * DEPTH)
#define STEPS ((PIECES + STEP_PIECES - 1) / STEP_PIECES)
#ifdef FIRST_STEPS
#define PART_BEGIN(part) ((part) * FIRST_STEPS)
#define STEPS_OF(from) ((from)->steps)
#else
#define PART_BEGIN(part) ((part) * STEPS)
#define STEPS_OF(from) STEPS
#endif
#if EXPERTS && STAGES > STEPS + 1
#error "nvidia/experts_few_rows.cl needs no more stages than the steps of a block, and one"
#endif
// A stage is read into registers before its products, to free it for the copies of a later step.
#define FREES (CHAINED && !QUANTIZED && !EXPERTS && DEPTH == 1)
#define AHEAD (FREES ? STAGES : STAGES - 1)  // steps with copies in flight
#define STEPS_AHEAD (AHEAD < STEPS ? AHEAD : STEPS)  // initially
#define GROUP_ITEMS (WARP * WARPS)
#define PIECE_BYTES (PIECE_SLOTS * 16)
#define WEIGHT_BYTES (TILES * PIECE_BYTES)              // for a piece in all tiles; then
#define DEPTH_BYTES (WEIGHT_BYTES + BLOCKS * 512)       // blocks of 8 tokens by 32 columns
#define STAGE_BYTES (DEPTH * DEPTH_BYTES)               // per warp
#define SUM_BYTES (BLOCKS * TILES * 512)                // per warp, later in the same memory
#if EXPERTS  // separate memory for the sums of two blocks: the next pieces are in flight then
#define LOCAL_BYTES (WARPS * (STAGES * STAGE_BYTES + 2 * SUM_BYTES))
#else
#define LOCAL_BYTES (WARPS * MAX(STAGES * STAGE_BYTES, SUM_BYTES))
#endif
#define ROWS (2 * TILES)                                // per lane
#define SCALED_TOKENS ((MAX_ROWS + WARPS - 1) / WARPS)  // tokens whose scales a warp computes
#ifndef CHAINED
#define CHAINED 0
#endif
#ifndef X_PARTS
#define X_PARTS 1
#endif
#define PART_STEPS (K / X_PARTS / 32 / STEP_PIECES)
#define PART_GROUPS ((N_TILES + TILES - 1) / TILES)
#if CHAINED
#define LOAD2(p) load_shared_float2(p)
#else
#define LOAD2(p) vload2(0, p)
#endif
#ifndef OUT  // nothing is left in 16 bits
#define OUT OPERAND
#endif
#if EXPERTS
#define SUMS_AT_ONCE 2  // warps' sums at once: one warp adds all sums, in few registers
#else
#define SUMS_AT_ONCE WARPS
#endif

// The source of a warp's copies.
typedef struct {
    __global const uchar* weight;  // the group's first tile
    __global const uint4* x;       // the lane's part of the first block
    int tiles, lane;               // tiles: existing tiles of the group
    int first, steps;              // among the group's pieces
    int tokens;                    // tokens in the step, from the lane's token in the first block on; NO_TOKENS: no such source
} source;
#define NO_TOKENS (-8)

// Copies piece p of the weights; zeros if the piece does not exist.
inline void fetch_weights(const source* from, const int p, const uint to) {
    const bool there = PIECES % STEP_PIECES == 0 || p < PIECES;
    const int piece = from->first + (there ? p : 0);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        const bool read = there && (N_TILES % TILES == 0 || i < from->tiles);
        __global const uchar* w = from->weight + (read ? i * TILE_BYTES : 0) + PIECE_AT(piece);
#pragma unroll
        for (int s = 0; s < PIECE_SLOTS; s += WARP)
            if (PIECE_SLOTS % WARP == 0 || s + from->lane < PIECE_SLOTS)
                copy16_async(to + i * PIECE_BYTES + PIECE_PLACE(s + from->lane) * 16,
                             w + SLOT_AT(piece, s + from->lane), read);
    }
}

// Copies piece p of the activations. In a chain with quantised weights (few bytes), only copies existing tokens.
inline void fetch_activations(const source* from, const int p, const uint to) {
    const bool there = PIECES % STEP_PIECES == 0 || p < PIECES;
    const int piece = from->first + (there ? p : 0);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
        copy16_async(to + WEIGHT_BYTES + i * 512 + X_PLACE(from->lane) * 16,
                     from->x + ((size_t)i * (K / 8) + piece * 4) * 8,
                     there && (!CHAINED || !QUANTIZED || from->tokens > 8 * i));
}

// Copies a warp's data for a step: weights, activations or both.
inline void fetch(const source* from, const int step, const int warp, const uint to, const bool weights, const bool activations) {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        const int piece = (step * DEPTH + d) * WARPS + warp;
        if (weights) fetch_weights(from, piece, to + d * DEPTH_BYTES);
        if (activations) fetch_activations(from, piece, to + d * DEPTH_BYTES);
    }
}

// The destination of a product's results.
typedef struct {
    __global void* out;
    __global const float* norm;
    __global uint* normed;
    __global float* squares;
    __local const float* scales;  // per token
    int out_row, n;
    bool adds;                    // add to y, if y is a sum
#if MEETS
    __global uint* meeting;
    int part;                     // column part
#endif
#if EXPERTS
    int2 rows;                    // rows of out for the lane's two tokens
    float2 weights;               // weights of the rows
    __global const float* bias;   // bias for the expert's rows
#endif
} target;

#if EXPERTS
#define ROW_OF(to, token) ((token) % 2 ? (to)->rows.y : (to)->rows.x)
#else
#define ROW_OF(to, token) (token)
#endif

// Stores a lane's values v for a token in 16 bits, beginning with `column`.
inline void write_packed(__global uint* to, const float v[ROWS], const int token, const int column) {
    uint words[TILES];
    to += (((size_t)token / 8 * (OUT_STRIDE / 8) + column / 8) * 8 + token % 8) * 4 + column % 8 / 2;
#pragma unroll
    for (int m = 0; m < TILES; ++m) words[m] = CAT(narrow_, OUT)(v[2 * m], v[2 * m + 1]);
#if TILES == 4
    *(__global uint4*)to = (uint4)(words[0], words[1], words[2], words[3]);
#elif TILES == 2
    *(__global uint2*)to = (uint2)(words[0], words[1]);
#else
    *to = words[0];
#endif
}

// Addends and factors for a lane's rows and two tokens, requested before other groups' sums arrive.
typedef struct {
    float2 y[2][TILES], norm[TILES];
} early_values;
#define ASKS_EARLY (MEETS && N % 16 == 0)

inline void ask_early(early_values* of, const target* to, const int first_tile, const int block, const int lane) {
    const int row = to->out_row + min(first_tile * 16 + lane / 4 * ROWS, N - ROWS), token = block * 8 + 2 * (lane % 4);
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            of->y[i][m] = load_shared_float2((__global const float*)to->out + (size_t)min(token + i, to->n - 1) * OUT_STRIDE + row + 2 * m);
        of->norm[m] = as_float2(load8_words(to->norm + row + 2 * m));
    }
}

// Writes a lane's rows for a token, v in row order. With an addition, v becomes the sums. early: the addends, with
// ASKS_EARLY.
inline void write_rows(float v[ROWS], const target* to, const int token, const int row, const float2* early) {
#if PACKED_OUT
    if (row < N && (!EXPERTS || token < to->n)) write_packed((__global uint*)to->out, v, ROW_OF(to, token), to->out_row + row);
#else
    if (token >= to->n) return;
        __global float* y = (__global float*)to->out + (size_t)ROW_OF(to, token) * OUT_STRIDE + to->out_row + row;
#if N % 16 == 0 && OUT_STRIDE % 4 == 0
    if (row >= N) return;
#pragma unroll
    for (int i = 0; i < ROWS; i += 2) {
        float2 w = (float2)(v[i], v[i + 1]);
        if (ASKS_EARLY)
            w += early[i / 2];
        else if (EPILOGUE == EPILOGUE_ADD && to->adds)
            w += LOAD2(y + i);
        *(__global float2*)(y + i) = w;
        v[i] = w.x;
        v[i + 1] = w.y;
    }
#else
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (row + i >= N) continue;
        if (EPILOGUE == EPILOGUE_ADD && to->adds) v[i] += CHAINED ? load_shared_float(y + i) : y[i];
        y[i] = v[i];
    }
#endif
#endif
}

#if LEAVES
// Leaves the rows v of a token times the norm's weights, and the sum of squares of the rows' tile. The sum is bit-identical for any
// TILES: it adds pairs of rows, then pairs of pairs, and so on.
inline void leave_normed(float v[ROWS], const target* to, const int token, const int row, const float2* early, const int lane) {
    float sums[TILES];
#pragma unroll
    for (int m = 0; m < TILES; ++m) sums[m] = fma(v[2 * m], v[2 * m], v[2 * m + 1] * v[2 * m + 1]);
#pragma unroll
    for (int i = 1; i < TILES; i *= 2)
#pragma unroll
        for (int m = 0; m < TILES; m += 2 * i) sums[m] += sums[m + i];
#pragma unroll
    for (int mask = 4; mask < 32 / TILES; mask *= 2) sums[0] += shuffle_xor(sums[0], mask);
    if (token >= to->n || row >= N) return;
    const int column = to->out_row + row;
    if (row % 16 == 0) to->squares[token * (OUT_STRIDE / 16) + column / 16] = sums[0];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) v[i] *= ASKS_EARLY ? (i % 2 ? early[i / 2].y : early[i / 2].x) : to->norm[column + i];
    write_packed(to->normed, v, token, column);
}
#endif

#if EXPERTS
// Adds the expert's bias to a token's rows v, and multiplies the rows by the expert's weight.
inline void weigh(float v[ROWS], const target* to, const int token, const int row) {
    const float weight = token % 2 ? to->weights.y : to->weights.x;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#if BIAS
        v[i] += to->bias[min(row + i, N - 1)];
#endif
        v[i] *= weight;
    }
}
#endif

// Applies the epilogue to a warp's rows and 8 tokens. v[m]: the lane's rows 2 m and 2 m + 1, each for tokens 2 t and 2 t + 1.
inline void finish(float4 v[TILES], const target* to, const int first_tile, const int block, const early_values* early,
                   const int lane) {
    const int g = lane / 4, token = block * 8 + 2 * (lane % 4);
    float y[ROWS];
#if SCALES_AFTER
#pragma unroll
    for (int m = 0; m < TILES; ++m) v[m] *= CODE_UNIT;
#endif
#if SCALED
    const float2 scales = vload2(0, to->scales + token);
#pragma unroll
    for (int m = 0; m < TILES; ++m) v[m] *= (float4)(scales, scales);
#endif
#if EPILOGUE == EPILOGUE_SWIGLU
    // Lanes with gate rows and lanes with the same up rows exchange values: each then has both for one token.
    const bool up = g & (8 / TILES);
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
        const float2 mine = up ? (float2)(v[m].y, v[m].w) : (float2)(v[m].x, v[m].z);
        const float2 given = up ? (float2)(v[m].x, v[m].z) : (float2)(v[m].y, v[m].w);
        const float2 other = (float2)(shuffle_xor(given.x, 32 / TILES), shuffle_xor(given.y, 32 / TILES));
        float2 gates = up ? other : mine, ups = up ? mine : other;
#if EXPERTS && BIAS
        const int row = first_tile * 8 + g / (16 / TILES) * 16 + g % (8 / TILES) * ROWS + 2 * m;
        gates += vload2(0, to->bias + min(row, N - 2));
        ups += vload2(0, to->bias + N + min(row, N - 2));
#endif
#if GATE == GATE_CLAMPED_SWIGLU
        const float2 result = APPLY_GATE(gates, ups, native_exp, float2);
#else
        const float2 result = native_divide(gates, 1.0f + native_exp(GATE_MINUS_Z(gates))) * ups;
#endif
        y[2 * m] = result.x;
        y[2 * m + 1] = result.y;
    }
    write_rows(y, to, token + up, first_tile * 8 + g / (16 / TILES) * 16 + g % (8 / TILES) * ROWS, 0);
#else
    const int row = first_tile * 16 + g * ROWS;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int m = 0; m < TILES; ++m) y[2 * m] = i ? v[m].y : v[m].x, y[2 * m + 1] = i ? v[m].w : v[m].z;
#if EXPERTS
        weigh(y, to, token + i, row);
#endif
        write_rows(y, to, token + i, row, early->y[i]);
#if LEAVES
        leave_normed(y, to, token + i, row, early->norm, lane);
#endif
    }
#endif
}

// Requests a warp's first pieces. done, count: the wait before reading x. first_step: the first step. Returns the next part of x to
// wait for.
inline int begin_pieces(const source* from, const uint to_stages, const int warp, volatile __global const uint* done, const uint count,
                        const int first_step) {
    int part = X_PARTS > 1 ? first_step / MAX(PART_STEPS, 1) : 0;
#if CHAINED
    // All stages' weights are in flight during the wait; the first stage is complete when all weights are.
#pragma unroll
    for (int step = 0; step < AHEAD; ++step)
        if (step < STEPS) fetch(from, step, warp, to_stages + step * STAGE_BYTES, true, false);
#if X_PARTS > 1
    for (; part <= (first_step + STEPS_AHEAD - 1) / PART_STEPS; ++part) warp_wait_until(done + part * COUNTER_WORDS, count);
#else
    wait_until(done, count);
#endif
#endif
#pragma unroll
    for (int step = 0; step < AHEAD; ++step) {
        if (step < STEPS) fetch(from, step, warp, to_stages + step * STAGE_BYTES, !CHAINED, true);
        copy_commit();
    }
    return part;
}

#define ACTIVATIONS(stage, j) activations((const __local uint4*)((stage) + WEIGHT_BYTES + (j) * 512), lane)

// Computes the sums of a warp's pieces, whose first pieces have been requested. stages: the warp's stages; at: the stage with the
// first piece, updated for the next block; next: with EXPERTS, the next block's source.
inline void add_pieces(float4 acc[BLOCKS][TILES], const source* from, const source* next, const __local uchar* stages, int* at,
                       const int warp, volatile __global const uint* done, const uint count, const int first_step, int part,
                       __local float* scales, __global const float* squares, const int n) {
    const uint to_stages = local_address(stages);
    const int lane = from->lane;
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j)
#pragma unroll
        for (int m = 0; m < TILES; ++m) acc[j][m] = 0.0f;
#if SCALED
    // Computed while the first pieces are in flight, for all of a warp's tokens at once.
    float sum_of[SCALED_TOKENS];
#pragma unroll
    for (int i = 0; i < SCALED_TOKENS; ++i) sum_of[i] = 0.0f;
#pragma unroll 2
    for (int pair = lane; pair < K / 32; pair += WARP)
#pragma unroll
        for (int i = 0; i < SCALED_TOKENS; ++i) {
            const float2 v = LOAD2(squares + min(warp + i * WARPS, n - 1) * (K / 16) + 2 * pair);
            sum_of[i] += v.x + v.y;
        }
#pragma unroll
    for (int i = 0; i < SCALED_TOKENS; ++i) {
        const float sum = warp_sum(sum_of[i]);
        if (lane == 0 && warp + i * WARPS < n) scales[warp + i * WARPS] = 1.0f / sqrt(NO_OVERFLOW(sum) / K + EPS);
    }
#endif
    int to = *at == 0 ? (STAGES - 1) * STAGE_BYTES : *at - STAGE_BYTES;  // the copies' destination: the previous or the current stage
#pragma unroll 1
    for (int step = 0; step < STEPS_OF(from); ++step) {
        COPY_WAIT(AHEAD - 1);
        warp_sync();  // the step has arrived for all lanes, and all lanes have finished the previous step
#if FREES
        uint4 a[2][TILES], b[BLOCKS];
        fragments(a, stages + *at, lane);
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) b[j] = ACTIVATIONS(stages + *at, j);
        warp_sync();
        to = *at;
#endif
#if EXPERTS
        const int ahead = step + STAGES - 1;
        if (ahead < STEPS)
            fetch(from, ahead, warp, to_stages + to, true, true);
        else if (next->tokens > NO_TOKENS)
            fetch(next, ahead - STEPS, warp, to_stages + to, true, true);
#else
        if (step + AHEAD < STEPS_OF(from)) {
#if CHAINED && X_PARTS > 1
            fetch(from, step + AHEAD, warp, to_stages + to, true, false);
            if (first_step + step + AHEAD == part * PART_STEPS) warp_wait_until(done + part++ * COUNTER_WORDS, count);
            fetch(from, step + AHEAD, warp, to_stages + to, false, true);
#else
            fetch(from, step + AHEAD, warp, to_stages + to, true, true);
#endif
        }
#endif
        copy_commit();
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            const __local uchar* pieces = stages + *at + d * DEPTH_BYTES;
#if !FREES
            uint4 a[2][TILES];
            fragments(a, pieces, lane);
#endif
#if SCALES_AFTER
            float4 factors[TILES];
            row_factors(factors, pieces, lane);
#endif
#pragma unroll
            for (int j = 0; j < BLOCKS; ++j) {
#if FREES
                const uint4 v = b[j];
#else
                const uint4 v = ACTIVATIONS(pieces, j);
#endif
#if SCALES_AFTER
#pragma unroll
                for (int m = 0; m < TILES; ++m) {
                    float4 sums = 0.0f;
                    CAT(mma_, OPERAND)(&sums, a[0][m], v.x, v.y);
                    CAT(mma_, OPERAND)(&sums, a[1][m], v.z, v.w);
                    acc[j][m] += sums * factors[m];
                }
#else
#pragma unroll
                for (int m = 0; m < TILES; ++m) CAT(mma_, OPERAND)(&acc[j][m], a[0][m], v.x, v.y);
#pragma unroll
                for (int m = 0; m < TILES; ++m) CAT(mma_, OPERAND)(&acc[j][m], a[1][m], v.z, v.w);
#endif
            }
        }
        to = *at;
        *at = *at == (STAGES - 1) * STAGE_BYTES ? 0 : *at + STAGE_BYTES;
    }
#if !EXPERTS
    COPY_WAIT_ALL;
    barrier(CLK_LOCAL_MEM_FENCE);
#endif
}

#if MEETS
// Returns true in the warp of the last of K_PARTS groups with sums for the rows and tokens: v is then the total sum, added from the
// first part to the last. The other groups leave sums as words that are not ABSENT, and the last group waits for each word.
#define ABSENT 0xffffffffu  // a bit pattern that no sum has
inline bool met(float4 v[TILES], const target* to, const int tile, const int block, const int lane) {
    const int place = tile / TILES * BLOCKS + block;
    __global uint* parts = to->meeting + (((size_t)place * (K_PARTS - 1) * TILES) * WARP + lane) * 4;
    if (to->part < K_PARTS - 1) {
#pragma unroll
        for (int m = 0; m < TILES; ++m)
            store_relaxed4(parts + (to->part * TILES + m) * WARP * 4, min(as_uint4(v[m]), (uint4)(ABSENT - 1)));
        return false;
    }
    uint4 words[(K_PARTS - 1) * TILES];
    bool waiting = true;
    int polls = 0;
    for (; waiting && polls < MOST_POLLS; ++polls) {
        bool missing = false;
#pragma unroll
        for (int i = 0; i < (K_PARTS - 1) * TILES; ++i) words[i] = load_relaxed4(parts + i * WARP * 4);
#pragma unroll
        for (int i = 0; i < (K_PARTS - 1) * TILES; ++i)
            missing |= max(max(words[i].x, words[i].y), max(words[i].z, words[i].w)) == ABSENT;
        waiting = warp_any(missing);
    }
    if (waiting) asm volatile("trap;");
#pragma unroll
    for (int i = 0; i < (K_PARTS - 1) * TILES; ++i) store_relaxed4(parts + i * WARP * 4, (uint4)(ABSENT));
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
        float4 sum = 0.0f;
#pragma unroll
        for (int i = 0; i < K_PARTS - 1; ++i) sum += as_float4(words[i * TILES + m]);
        v[m] = sum + v[m];
    }
    return true;
}
#endif

// Each warp leaves its sums in `buffers`, and then adds up all warps' sums for some blocks: warp `first` for the first block.
inline void add_warps(float4 acc[BLOCKS][TILES], __local uint4* buffers, const target* to, const int tile, const int warp,
                      const int first, const int lane) {
    __local float4* sums = (__local float4*)buffers + lane;  // [warp][block][tile][lane]
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j)
#pragma unroll
        for (int m = 0; m < TILES; ++m) sums[((warp * BLOCKS + j) * TILES + m) * WARP] = acc[j][m];
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int j = (warp + WARPS - first) % WARPS; j < BLOCKS; j += WARPS) {
        float4 v[TILES];
        early_values early;
#if ASKS_EARLY
        if (to->part == K_PARTS - 1) ask_early(&early, to, tile, j, lane);
#endif
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            v[m] = 0.0f;
#pragma unroll SUMS_AT_ONCE
            for (int i = 0; i < WARPS; ++i) v[m] += sums[((i * BLOCKS + j) * TILES + m) * WARP];
        }
#if MEETS
        if (!met(v, to, tile, j, lane)) continue;
#endif
        finish(v, to, tile, j, &early, lane);
    }
}

#if !EXPERTS
// The work of group number `group`. buffers: LOCAL_BYTES; scales: [MAX_ROWS]. With CHAINED the group waits until `done` equals
// `count` before it reads other groups' results; count 0: no wait. Counters of parts are COUNTER_WORDS apart.
inline void few_rows_unit(const int group, __local uint4* buffers, __local float* scales, volatile __global const uint* done,
                          const uint count, __global const uchar* weight, __global const uint4* x, __global void* out,
                          __global const int* state, const int out_row, __global const float* norm, __global uint* normed,
                          __global float* squares, __global uint* meeting) {
    const int lane = get_local_id(0) % WARP, warp = get_local_id(0) / WARP;
    const int k_part = K_PARTS > 1 ? group / PART_GROUPS : 0, tile = (group - k_part * PART_GROUPS) * TILES;
    const int n = state[STATE_N_TOKENS];
    const __local uchar* stages = (const __local uchar*)buffers + warp * (STAGES * STAGE_BYTES);
#ifdef FIRST_STEPS
    const int first = k_part * FIRST_STEPS * STEP_PIECES, steps = k_part > 0 ? 2 * STEPS - FIRST_STEPS : FIRST_STEPS;
#else
    const int first = k_part * PIECES, steps = STEPS;
#endif
    const source from = {weight + (size_t)tile * TILE_BYTES, x + lane, N_TILES - tile, lane, first, steps, n - lane % 8};
    float4 acc[BLOCKS][TILES];
    const int part = begin_pieces(&from, local_address(stages), warp, done, count, PART_BEGIN(k_part));
    int at = 0;
    add_pieces(acc, &from, &from, stages, &at, warp, done, count, PART_BEGIN(k_part), part, scales, squares, n);
#if MEETS
    const target to_rows = {out, norm, normed, squares, scales, out_row, n, true, meeting, k_part};
#else
    if (k_part > 0) out = squares + (size_t)(k_part - 1) * MAX_ROWS * OUT_STRIDE;
    const target to_rows = {out, norm, normed, squares, scales, out_row, n, k_part == 0};
#endif
    add_warps(acc, buffers, &to_rows, tile, warp, 0, lane);
}
#endif

#if !CHAINED && !EXPERTS
__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1)))
void linear_few_rows(__global const uchar* weight, __global const uint4* x, __global void* out, __global const int* state,
                     const int out_row, __global const float* norm, __global uint* normed, __global float* squares) {
    __local uint4 __attribute__((aligned(128))) buffers[LOCAL_BYTES / 16];
    __local float scales[MAX_ROWS];
    few_rows_unit(get_group_id(0), buffers, scales, 0, 0, weight, x, out, state, out_row, norm, normed, squares, 0);
}
#endif

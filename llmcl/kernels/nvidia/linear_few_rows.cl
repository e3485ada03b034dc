// Y = X W^T for the few tokens of a step, at most MAX_ROWS, on the matrix units of NVIDIA GPUs (sm_80 and later): each weight is
// read once, at the memory's speed.
// Formula and arguments as in cpu/linear_prefill.cl, except that x is OPERAND in blocks of 8 x 8 (`pack_activations`): products of
// 16-bit operands, float32 sums. With PACKED_OUT the output is OUT in that layout, too: what the next product takes.
//
//   partial   float4 [units][SPLITS][..]: sums that wait for those of other groups   arrived   int [units], zero between launches
//
// A norm between two products is split over them. With LEAVES the one that adds to the residual leaves x times the norm's weights,
// too, in `normed` (OUT, in blocks), and the sum of squares of each 16 values of it in `squares`. With SCALED the next one takes
// those rows and multiplies its sums by 1 / sqrt(mean of squares + EPS).
//
//   norm     float [OUT_STRIDE], weights        normed  OUT [ceil(n/8)][OUT_STRIDE/8][8][8]
//   squares  float [MAX_ROWS][OUT_STRIDE/16], as SCALED takes it [MAX_ROWS][K/16]
//
// The weights are the operand of 16 rows, 8 tokens the columns of the other. A warp takes TILES tiles and every RUNS-th piece of
// 32 columns. Of its 16 TILES rows lane (g, t) = (lane / 4, lane % 4) has 2 TILES neighbouring ones, from 2 TILES g on, and of a piece
// the columns 8 t .. 8 t + 7: which rows and columns meet in one product is free, as long as the activations' columns agree.
//
//                     a work-group: WARPS_M x WARPS_K warps            columns, in pieces of 32
//     tiles        +--------------------------------------+            run:  0 1 2 .. RUNS-1  0 1 2 .. RUNS-1  0 ..
//     TILES        | warp (0, 0)  warp (0, 1) ..          |            run = group's split * WARPS_K + its warp's k
//     TILES        | warp (1, 0)  ..                      |
//                  +--------------------------------------+
//
// Pieces of weights and activations come through STAGES buffers in local memory, by asynchronous copies. A warp copies the weights
// it needs, warps with the same columns share the activations. Sums: of INNER neighbouring runs, then of these sums, each
// from the first to the last. They do not depend on MAX_ROWS or n, nor on which group comes first: with SPLITS > 1 the last group
// of a unit to arrive adds what all have left in `partial`.
//
// Index space: groups (ceil(N_TILES / (TILES WARPS_M)), SPLITS) of 32 WARPS_M WARPS_K.
// Build: WEIGHT, K (a multiple of 32), N, N_TILES, OUT_STRIDE, EPILOGUE, MAX_ROWS (a multiple of 8), TILES (1, 2 or 4; with a gate 2 or
// 4), WARPS_M, WARPS_K, SPLITS, INNER (a divisor of WARPS_K; WARPS_K where SPLITS > 1), STAGES, PACKED_OUT (OUT_STRIDE a multiple of 32,
// EPILOGUE not the one that adds) and then OUT. x, and out with PACKED_OUT, have tokens to a multiple of 8; what lies past n is anything.
// LEAVES (OUT_STRIDE a multiple of 32, EPILOGUE the one that adds) and then OUT, SCALED and then EPS.
// Local memory: LOCAL_BYTES and 4 MAX_ROWS.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(OUT_STRIDE) || !defined(EPILOGUE) || \
    !defined(MAX_ROWS) || !defined(TILES) || !defined(WARPS_M) || !defined(WARPS_K) || !defined(SPLITS) || !defined(INNER) || \
    !defined(STAGES) || !defined(PACKED_OUT) || !defined(LEAVES) || !defined(SCALED) || !defined(STATE_N_TOKENS)
#error "nvidia/linear_few_rows.cl needs the build constants named in its head"
#endif
#include "common/tiles.cl"
#include "nvidia/ptx.cl"
#if QUANTIZED
#include "nvidia/few_rows_quantized.cl"
#else
#include "nvidia/few_rows_16_bit.cl"
#endif

#define BLOCKS (MAX_ROWS / 8)
#define RUNS (WARPS_K * SPLITS)
#define PIECES (K / 32)
#define STEPS ((PIECES + RUNS - 1) / RUNS)
#define WARPS (WARPS_M * WARPS_K)
#define GROUP_ITEMS (WARP * WARPS)
#define UNIT_TILES (TILES * WARPS_M)
#define PIECE_BYTES (PIECE_SLOTS * 16)
#define X_AT (WARPS * TILES * PIECE_BYTES)             // in a stage: the weights of all warps, then
#define STAGE_BYTES (X_AT + WARPS_K * BLOCKS * 512)    // blocks of 8 tokens by 32 columns
#define SUM_BYTES (WARPS * BLOCKS * TILES * 512)       // afterwards, in the same memory
#define LOCAL_BYTES MAX(STAGES * STAGE_BYTES, SUM_BYTES)
#define ROWS (2 * TILES)  // of a lane
#ifndef OUT  // where nothing is left in 16 bits
#define OUT OPERAND
#endif

typedef struct {
    __global const uchar* weight;  // of the warp's first tile
    __global const uint4* x;       // the lane's part of the first block
    uint to_weight, to_x;          // local addresses in the first stage
    int tile, lane, warp_m;
} source;

// Asks for what a warp copies of a step.
inline void fetch(const source* from, const int step, const uint stage, const int first_piece) {
    const int p = first_piece + step * RUNS;
    const bool there = PIECES % RUNS == 0 || p < PIECES;  // where not: zeros
    const int piece = there ? p : 0;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        const bool read = there && (N_TILES % UNIT_TILES == 0 || from->tile + i < N_TILES);
        __global const uchar* w = from->weight + (read ? i * TILE_BYTES : 0) + PIECE_AT(piece);
#pragma unroll
        for (int s = 0; s < PIECE_SLOTS; s += WARP)
            if (PIECE_SLOTS % WARP == 0 || s + from->lane < PIECE_SLOTS)
                copy16_async(from->to_weight + stage + i * PIECE_BYTES + PIECE_PLACE(s + from->lane) * 16,
                             w + SLOT_AT(piece, s + from->lane), read);
    }
#pragma unroll
    for (int i = 0; i < BLOCKS; i += WARPS_M)
        if (BLOCKS % WARPS_M == 0 || i + from->warp_m < BLOCKS)
            copy16_async(from->to_x + stage + i * 512, from->x + ((size_t)i * (K / 8) + piece * 4) * 8, there);
}

// Where a product's results go.
typedef struct {
    __global void* out;
    __global const float* norm;
    __global uint* normed;
    __global float* squares;
    __local const float* scales;  // of a token
    int out_row, n;
} target;

// Leaves a lane's values v of a token in 16 bits, `column` being the first.
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

// What a lane does with its rows of a token: v in order of rows, with an addition as they are then.
inline void write_rows(float v[ROWS], const target* to, const int token, const int row) {
#if PACKED_OUT
    if (row < N) write_packed((__global uint*)to->out, v, token, to->out_row + row);
#else
    if (token >= to->n) return;
    __global float* y = (__global float*)to->out + (size_t)token * OUT_STRIDE + to->out_row + row;
#if N % 16 == 0 && OUT_STRIDE % 4 == 0
    if (row >= N) return;
#pragma unroll
    for (int i = 0; i < ROWS; i += 2) {
        float2 w = (float2)(v[i], v[i + 1]);
        if (EPILOGUE == EPILOGUE_ADD) w += *(__global const float2*)(y + i);
        *(__global float2*)(y + i) = w;
        v[i] = w.x;
        v[i + 1] = w.y;
    }
#else
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (row + i >= N) continue;
        if (EPILOGUE == EPILOGUE_ADD) v[i] += y[i];
        y[i] = v[i];
    }
#endif
#endif
}

#if LEAVES
// The rows v of a token times the norm's weights, and the sum of squares of the tile that they are of. It is the same to the bit for
// any TILES: of pairs of rows, of pairs of these and so on.
inline void leave_normed(float v[ROWS], const target* to, const int token, const int row, const int lane) {
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
    for (int i = 0; i < ROWS; ++i) v[i] *= to->norm[column + i];
    write_packed(to->normed, v, token, column);
}
#endif

// The epilogue of a warp's rows and 8 tokens. v[m]: rows 2 m and 2 m + 1 of the lane's; of each tokens 2 t and 2 t + 1.
inline void finish(float4 v[TILES], const target* to, const int first_tile, const int block, const int lane) {
    const int g = lane / 4, token = block * 8 + 2 * (lane % 4);
    float y[ROWS];
#if SCALED
    const float2 scales = vload2(0, to->scales + token);
#pragma unroll
    for (int m = 0; m < TILES; ++m) v[m] *= (float4)(scales, scales);
#endif
#if EPILOGUE == EPILOGUE_SWIGLU
    // The lanes of a gate's rows and of the same rows of up exchange what the other needs: each has both for one token.
    const bool up = g & (8 / TILES);
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
        const float2 mine = up ? (float2)(v[m].y, v[m].w) : (float2)(v[m].x, v[m].z);
        const float2 given = up ? (float2)(v[m].x, v[m].z) : (float2)(v[m].y, v[m].w);
        const float2 other = (float2)(shuffle_xor(given.x, 32 / TILES), shuffle_xor(given.y, 32 / TILES));
        const float2 gates = up ? other : mine, ups = up ? mine : other;
        const float2 result = native_divide(gates, 1.0f + native_exp(GATE_MINUS_Z(gates))) * ups;
        y[2 * m] = result.x;
        y[2 * m + 1] = result.y;
    }
    write_rows(y, to, token + up, first_tile * 8 + g / (16 / TILES) * 16 + g % (8 / TILES) * ROWS);
#else
    const int row = first_tile * 16 + g * ROWS;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int m = 0; m < TILES; ++m) y[2 * m] = i ? v[m].y : v[m].x, y[2 * m + 1] = i ? v[m].w : v[m].z;
        write_rows(y, to, token + i, row);
#if LEAVES
        leave_normed(y, to, token + i, row, lane);
#endif
    }
#endif
}

__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1)))
void linear_few_rows(__global const uchar* weight, __global const uint4* x, __global void* out, __global const int* state,
                     const int out_row, __global float4* partial, __global int* arrived, __global const float* norm,
                     __global uint* normed, __global float* squares) {
    __local uint4 __attribute__((aligned(128))) buffers[LOCAL_BYTES / 16];
    __local int is_last;
    __local float scales[MAX_ROWS];
    const int lane = get_local_id(0) % WARP, warp = get_local_id(0) / WARP, warp_m = warp % WARPS_M, warp_k = warp / WARPS_M;
    const int unit = get_group_id(0), split = get_group_id(1), n = state[STATE_N_TOKENS];
    const int tile = unit * UNIT_TILES + warp_m * TILES, first_piece = split * WARPS_K + warp_k;
    const __local uchar* local_bytes = (const __local uchar*)buffers;

    source from;
    from.lane = lane;
    from.warp_m = warp_m;
    from.tile = tile;
    from.weight = weight + (size_t)(N_TILES % UNIT_TILES == 0 ? tile : min(tile, N_TILES - 1)) * TILE_BYTES;
    from.x = x + (size_t)warp_m * K + lane;
    from.to_weight = local_address(buffers) + warp * TILES * PIECE_BYTES;
    from.to_x = local_address(buffers) + X_AT + (warp_k * BLOCKS + warp_m) * 512 + X_PLACE(lane) * 16;

    float4 acc[BLOCKS][TILES];
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j)
#pragma unroll
        for (int m = 0; m < TILES; ++m) acc[j][m] = 0.0f;

    uint to = 0;  // bytes to the stage that is copied to next
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < STEPS) fetch(&from, step, to, first_piece);
        copy_commit();
        to += STAGE_BYTES;
    }
#if SCALED
    for (int token = warp; token < n; token += WARPS) {  // while the first pieces are on their way
        float sum = 0.0f;
        for (int i = lane; i < K / 16; i += WARP) sum += squares[token * (K / 16) + i];
        sum = warp_sum(sum);
        if (lane == 0) scales[token] = 1.0f / sqrt(NO_OVERFLOW(sum) / K + EPS);
    }
#endif
    const target to_rows = {out, norm, normed, squares, scales, out_row, n};
    uint at = 0;
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
        COPY_WAIT(STAGES - 2);
        if (WARPS_M > 1) barrier(CLK_LOCAL_MEM_FENCE);  // the step is there for all, and all have done with the one before
        else warp_sync();
        if (step + STAGES - 1 < STEPS) fetch(&from, step + STAGES - 1, to, first_piece);
        copy_commit();
        to = to == (STAGES - 1) * STAGE_BYTES ? 0 : to + STAGE_BYTES;

        uint4 a[2][TILES];
        fragments(a, local_bytes + at + warp * TILES * PIECE_BYTES, lane);
        const __local uint4* blocks = (const __local uint4*)(local_bytes + at + X_AT) + warp_k * BLOCKS * 32;
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) {
            const uint4 b = activations(blocks + j * 32, lane);
#pragma unroll
            for (int m = 0; m < TILES; ++m) CAT(mma_, OPERAND)(&acc[j][m], a[0][m], b.x, b.y);
#pragma unroll
            for (int m = 0; m < TILES; ++m) CAT(mma_, OPERAND)(&acc[j][m], a[1][m], b.z, b.w);
        }
        at = at == (STAGES - 1) * STAGE_BYTES ? 0 : at + STAGE_BYTES;
    }
    COPY_WAIT_ALL;
    barrier(CLK_LOCAL_MEM_FENCE);

    // Each warp leaves its sums, and takes those of all columns for some of the blocks.
    __local float4* sums = (__local float4*)buffers + lane;  // [warp][block][tile][lane]
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j)
#pragma unroll
        for (int m = 0; m < TILES; ++m) sums[((warp * BLOCKS + j) * TILES + m) * WARP] = acc[j][m];
    barrier(CLK_LOCAL_MEM_FENCE);
    partial += ((size_t)unit * SPLITS * WARPS_M + warp_m) * BLOCKS * TILES * WARP + lane;  // [split][warp_m][block][tile][lane]
    const int split_stride = WARPS_M * BLOCKS * TILES * WARP;
    for (int j = warp_k; j < BLOCKS; j += WARPS_K) {
        float4 v[TILES];
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            float4 total = 0.0f;
#pragma unroll
            for (int outer = 0; outer < WARPS_K; outer += INNER) {
                float4 sum = 0.0f;
#pragma unroll
                for (int i = 0; i < INNER; ++i)
                    sum += sums[(((outer + i) * WARPS_M + warp_m) * BLOCKS + j) * TILES * WARP + m * WARP];
                total += sum;
            }
            v[m] = total;
        }
        if (SPLITS == 1) finish(v, &to_rows, tile, j, lane);
        else
#pragma unroll
            for (int m = 0; m < TILES; ++m) partial[split * split_stride + (j * TILES + m) * WARP] = v[m];
    }
    if (SPLITS == 1) return;

    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (get_local_id(0) == 0) {
        device_fence();
        is_last = atomic_inc(arrived + unit) == SPLITS - 1;
        if (is_last) arrived[unit] = 0;  // for the next launch
        device_fence();
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (!is_last) return;
    for (int j = warp_k; j < BLOCKS; j += WARPS_K) {
        float4 v[TILES], parts[SPLITS][TILES];
#pragma unroll
        for (int s = 0; s < SPLITS; ++s)
#pragma unroll
            for (int m = 0; m < TILES; ++m) parts[s][m] = load_shared_float4(partial + s * split_stride + (j * TILES + m) * WARP);
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            v[m] = parts[0][m];
#pragma unroll
            for (int s = 1; s < SPLITS; ++s) v[m] += parts[s][m];
        }
        finish(v, &to_rows, tile, j, lane);
    }
}

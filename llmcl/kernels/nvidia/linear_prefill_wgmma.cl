// Y = X W^T for all tokens of a step on the matrix units of Hopper GPUs, by asynchronous warpgroup products (wgmma).
// Formula and arguments as in cpu/linear_prefill.cl, except for x: WEIGHT in blocks of 8 x 8 (`pack_activations`). Operands have 16
// bits, sums are float32. With PACKED_OUT the output has the same layout, as the next product's input.
//
// A work-group takes one unit after the other: 128 tokens by BLOCK_TILES weight tiles with 16 rows. Each of its two warpgroups has
// 64 tokens and all rows. Steps of 32 columns come through STAGES buffers in local memory, copied during the products of earlier
// steps. The next unit's first steps are copied while the last unit's results are written.
//
//               weight rows: BLOCK_TILES of 16        a stage:  X   8 tokens x 32 columns at 512 (token / 8), blocks of 8 x 8
//              +---------------------------+                    W   tile i at 8192 + 1024 i, 32 bytes per column,
//   64 tokens  | warpgroup 0               |                        halves exchanged, see wgmma.cl
//              +---------------------------+
//   64 tokens  | warpgroup 1               |
//              +---------------------------+
//
// Index space: any number of groups with 256 work-items; a unit's tokens change fastest, so that groups share weights while they run.
// Build: WEIGHT (f16 or bf16), K (a multiple of 32), N, N_TILES, OUT_STRIDE, EPILOGUE, PACKED_OUT (OUT_STRIDE a multiple of 32,
// EPILOGUE not "add"), BLOCK_TILES (16, 8 or 4: small for few tokens, to keep compute units busy). x, and out with PACKED_OUT, have
// tokens up to a multiple of 128; rows past n may hold anything. Local memory: 147456 bytes.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(OUT_STRIDE) || !defined(EPILOGUE) || \
    !defined(PACKED_OUT) || !defined(BLOCK_TILES) || !defined(STATE_N_TOKENS)
#error "nvidia/linear_prefill_wgmma.cl needs the build constants named in its head"
#endif
#include "common/common.cl"
#include "nvidia/wgmma.cl"

#if BLOCK_TILES == 16
#define STAGES 6
#define MULTIPLY WGMMA_256
#elif BLOCK_TILES == 8
#define STAGES 9
#define MULTIPLY WGMMA_128
#elif BLOCK_TILES == 4
#define STAGES 12
#define MULTIPLY WGMMA_64
#else
#error "nvidia/linear_prefill_wgmma.cl: BLOCK_TILES is 16, 8 or 4"
#endif
#define BLOCK_TOKENS 128
#define BLOCK_K 32
#define GROUP_ITEMS 256
#define SUMS (BLOCK_TILES * 8)
#define X_BYTES (BLOCK_TOKENS * BLOCK_K * 2)
#define TILE_BYTES (BLOCK_K * 32)
#define STAGE_BYTES (X_BYTES + BLOCK_TILES * TILE_BYTES)
#define STEPS (K / BLOCK_K)
#define AHEAD (STAGES - 2)  // steps fetched ahead while two other steps' products may be running
#define UNITS_OF(n) (((n) + BLOCK_TOKENS - 1) / BLOCK_TOKENS * ((N_TILES + BLOCK_TILES - 1) / BLOCK_TILES))

// A work-item's next copies: two pieces of X, 64 tokens apart; and two neighbouring pieces in each of two tiles, 8 apart, or in one
// of 8 tiles, or a piece in one of 4 tiles.
typedef struct {
    __global const CAT(WEIGHT, _t)* x;
    __global const CAT(WEIGHT, _t)* w0;
#if BLOCK_TILES == 16
    __global const CAT(WEIGHT, _t)* w1;
#endif
    int unit, step;
    uint to;  // bytes to the stage
} source;

inline int first_token_of(const int unit, const int n) {
    return unit % ((n + BLOCK_TOKENS - 1) / BLOCK_TOKENS) * BLOCK_TOKENS;
}
inline int first_tile_of(const int unit, const int n) {
    return unit / ((n + BLOCK_TOKENS - 1) / BLOCK_TOKENS) * BLOCK_TILES;
}

inline void begin_unit(source* from, __global const CAT(WEIGHT, _t)* x, __global const CAT(WEIGHT, _t)* weight, const int n) {
    const int lane = get_local_id(0) % WARP, warp = get_local_id(0) / WARP;
    const int tile = first_tile_of(from->unit, n) + (BLOCK_TILES == 4 ? warp % 4 : warp);
    from->x = x + (size_t)(first_token_of(from->unit, n) / 8 + warp) * K * 8 + lane * 8;
    from->w0 = weight + (size_t)min(tile, N_TILES - 1) * K * 16 + lane * 8 + (BLOCK_TILES == 4 ? warp / 4 * 256 : 0);
#if BLOCK_TILES == 16
    from->w1 = weight + (size_t)min(tile + 8, N_TILES - 1) * K * 16 + lane * 8;
#endif
    from->step = 0;
}

// to: destinations for the work-item's first pieces of X and W in the first stage.
inline void fetch(source* from, const uint to_x, const uint to_w, __global const CAT(WEIGHT, _t)* x,
                  __global const CAT(WEIGHT, _t)* weight, const int n) {
    if (from->unit < UNITS_OF(n)) {
        copy16_async(to_x + from->to, from->x, true);
        copy16_async(to_x + from->to + X_BYTES / 2, from->x + (size_t)K * 64, true);
        copy16_async(to_w + from->to, from->w0, true);
#if BLOCK_TILES > 4
        copy16_async(to_w + from->to + 512, from->w0 + 256, true);
#endif
#if BLOCK_TILES == 16
        copy16_async(to_w + from->to + 8 * TILE_BYTES, from->w1, true);
        copy16_async(to_w + from->to + 8 * TILE_BYTES + 512, from->w1 + 256, true);
        from->w1 += BLOCK_K * 16;
#endif
        from->x += BLOCK_K * 8;
        from->w0 += BLOCK_K * 16;
        from->to = from->to == (STAGES - 1) * STAGE_BYTES ? 0 : from->to + STAGE_BYTES;
        if (++from->step == STEPS) {
            from->unit += get_num_groups(0);
            begin_unit(from, x, weight, n);
        }
    }
    copy_commit();
}

// Writes a lane's two neighbouring values in the 8 rows from `row` on; y points at row 0.
#if EPILOGUE == EPILOGUE_SWIGLU
#define BLOCK_OUT (BLOCK_TILES * 8)
#else
#define BLOCK_OUT (BLOCK_TILES * 16)
#endif
#define EXISTS(row) (N % BLOCK_OUT == 0 || (row) + 2 * ((int)get_local_id(0) % 4) < N)
#if PACKED_OUT
inline void write2(__global uint* y, const int row, const float2 v) {  // a warp writes the 128 bytes of a block
    if (EXISTS(row)) y[(uint)row / 8 * WARP] = CAT(narrow_, WEIGHT)(v.x, v.y);
}
#elif OUT_STRIDE % 2 == 0
inline float2 read2(__global const float* y, const int row) {
    return EXISTS(row) ? *(__global const float2*)(y + row) : 0.0f;
}
inline void write2(__global float* y, const int row, const float2 v) {
    if (EXISTS(row + 1)) *(__global float2*)(y + row) = v;
    else if (EXISTS(row)) y[row] = v.x;
}
#else
inline float2 read2(__global const float* y, const int row) {
    return (float2)(EXISTS(row) ? y[row] : 0.0f, EXISTS(row + 1) ? y[row + 1] : 0.0f);
}
inline void write2(__global float* y, const int row, const float2 v) {
    if (EXISTS(row)) y[row] = v.x;
    if (EXISTS(row + 1)) y[row + 1] = v.y;
}
#endif

__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1)))
void linear_prefill(__global const CAT(WEIGHT, _t)* weight, __global const CAT(WEIGHT, _t)* x, __global void* out,
                    __global const int* state, const int out_row) {
    __local uint4 __attribute__((aligned(1024))) buffers[STAGES * STAGE_BYTES / 16];
    const uint local_base = local_address(buffers);
    const int n = state[STATE_N_TOKENS];
    const int lane = get_local_id(0) % WARP, warp = get_local_id(0) / WARP;

    const uint to_x = local_base + get_local_id(0) * 16;
    const uint own_tile = BLOCK_TILES == 4 ? warp % 4 * TILE_BYTES + warp / 4 * 512 : warp * TILE_BYTES;
    const uint to_w = local_base + X_BYTES + own_tile + (lane ^ ((lane >> 3) & 1)) * 16;
    source from;
    from.unit = get_group_id(0);
    from.to = 0;
    begin_unit(&from, x, weight, n);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) fetch(&from, to_x, to_w, x, weight, n);

    const ulong a = wgmma_operand(local_base + warp / 4 * (X_BYTES / 2), 128, BLOCK_K * 16, NO_SWIZZLE);
    const ulong b = wgmma_operand(local_base + X_BYTES, TILE_BYTES, 256, SWIZZLE_32);
    uint stage = 0;  // in units of 16 bytes, as in operands
    for (int unit = get_group_id(0); unit < UNITS_OF(n); unit += get_num_groups(0)) {
        float acc[SUMS];  // rows 8 j + 2 (lane % 4) + {0, 1}: acc[4 j + {0, 1}] for token lane / 4, acc[4 j + {2, 3}] for the token 8 later
#pragma unroll
        for (int i = 0; i < SUMS; ++i) acc[i] = 0;
        for (int step = 0; step < STEPS; ++step) {
            COPY_WAIT(AHEAD - 1);
            local_fence_async();
            barrier(CLK_LOCAL_MEM_FENCE);  // the step has arrived, and all products of the step before the last are done
            fetch(&from, to_x, to_w, x, weight, n);
            wgmma_fence();
            MULTIPLY(WEIGHT, acc, a + stage, b + stage, 1);
            MULTIPLY(WEIGHT, acc, a + stage + 256 / 16, b + stage + 512 / 16, 1);
            wgmma_commit();
            WGMMA_WAIT(1);
            stage = stage == (STAGES - 1) * STAGE_BYTES / 16 ? 0 : stage + STAGE_BYTES / 16;
        }
        WGMMA_WAIT(0);
        WGMMA_SETTLE32(acc, 0);
#if BLOCK_TILES > 4
        WGMMA_SETTLE32(acc, 32);
#endif
#if BLOCK_TILES == 16
        WGMMA_SETTLE32(acc, 64);
        WGMMA_SETTLE32(acc, 96);
#endif

        const int first_token = first_token_of(unit, n), first_tile = first_tile_of(unit, n);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int token = first_token + warp * 16 + h * 8 + lane / 4;
#if PACKED_OUT
            __global uint* y = (__global uint*)out + (size_t)(token / 8) * (OUT_STRIDE * 4) + (uint)out_row / 8 * WARP + lane;
#else
            if (token >= n) continue;
            __global float* y = (__global float*)out + (size_t)token * OUT_STRIDE + out_row + 2 * (lane % 4);
#endif
#if EPILOGUE == EPILOGUE_SWIGLU
#pragma unroll
            for (int j = 0; j < BLOCK_TILES; ++j) {  // 8 rows of a gate tile; its up tile is 8 sums later
                const int at = (j / 2 * 4 + j % 2) * 4 + 2 * h;
                const float2 gate = (float2)(acc[at], acc[at + 1]), up = (float2)(acc[at + 8], acc[at + 9]);
                write2(y, first_tile * 8 + j * 8, native_divide(gate, 1.0f + native_exp(GATE_MINUS_Z(gate))) * up);
            }
#else
#if EPILOGUE == EPILOGUE_ADD
#pragma unroll
            for (int j = 0; j < 2 * BLOCK_TILES; ++j) {  // read everything before the first write
                const float2 before = read2(y, first_tile * 16 + j * 8);
                acc[4 * j + 2 * h] += before.x;
                acc[4 * j + 2 * h + 1] += before.y;
            }
#endif
#pragma unroll
            for (int j = 0; j < 2 * BLOCK_TILES; ++j)
                write2(y, first_tile * 16 + j * 8, (float2)(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]));
#endif
        }
    }
}

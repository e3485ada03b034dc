// Y = X W^T for all tokens of a step on the matrix units of NVIDIA GPUs (sm_80 and later).
// Formula and arguments as in cpu/linear_prefill.cl; X and W are 16-bit in the product (X is rounded where it is float32),
// sums are float32.
//
// A work-group of 8 warps takes 128 tokens and 8 weight tiles (128 rows), a warp 64 tokens and 32 rows: 4 x 4 results of
// 16 x 8. Steps of 32 columns come through STAGES buffers in local memory, copied while earlier ones are multiplied.
//
//                         weight rows: 8 tiles of 16                    local memory, 16-byte pieces:
//              +-------+-------+-------+-------+                   X   row r, piece c at 4 r + (c ^ (r / 2) % 4)
//   64 tokens  | warp0 | warp1 | warp2 | warp3 |                   W   column k, half c at 2 k + (c ^ (k / 4) % 2)
//              +-------+-------+-------+-------+                   so that the 8 rows that a matrix load reads lie in
//   64 tokens  | warp4 | warp5 | warp6 | warp7 |                   8 different groups of banks
//              +-------+-------+-------+-------+
//
// Index space: groups (ceil(n / 128), ceil(N_TILES / 8)) of 256: the groups that run together share weights, which are
// read once, while X stays in the second-level cache.
// Build: WEIGHT (f16 or bf16), X (f32, or the same as WEIGHT), K (a multiple of 32), N, N_TILES, OUT_STRIDE, EPILOGUE.
// Local memory: 16384 STAGES bytes.
#if !defined(WEIGHT) || !defined(X) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(OUT_STRIDE) || \
    !defined(EPILOGUE) || !defined(STATE_N_TOKENS)
#error "nvidia/linear_prefill.cl needs the build constants WEIGHT, X, K, N, N_TILES, OUT_STRIDE, EPILOGUE and those of the step state"
#endif
#include "common.cl"
#include "nvidia/ptx.cl"

#define STAGES 3
#define BLOCK_TOKENS 128
#define BLOCK_TILES 8
#define BLOCK_K 32
#define STAGE_BYTES 16384
#define STEPS (K / BLOCK_K)

#define f32_IS_WIDE 1
#define X_IS_WIDE CAT(X, _IS_WIDE)

// Asks for step `step` of X and W in buffer step % STAGES.
inline void fetch(const uint local_base, __global const CAT(X, _t)* x, __global const CAT(WEIGHT, _t)* w, const int step,
                  const int first_token, const int first_tile, const int n) {
    const int lid = get_local_id(0);
    const uint xs = local_base + (step % STAGES) * STAGE_BYTES, ws = xs + STAGE_BYTES / 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int piece = lid + 256 * i, row = piece / 4, c = piece % 4;
        const uint to = xs + (row * 4 + (c ^ ((row >> 1) & 3))) * 16;
        __global const CAT(X, _t)* from = x + (size_t)min(first_token + row, n - 1) * K + step * BLOCK_K + c * 8;
#if X_IS_WIDE == 1
        const float8 v = vload8(0, from);
        store16_local(to, (uint4)(CAT(narrow_, WEIGHT)(v.s0, v.s1), CAT(narrow_, WEIGHT)(v.s2, v.s3),
                                  CAT(narrow_, WEIGHT)(v.s4, v.s5), CAT(narrow_, WEIGHT)(v.s6, v.s7)));
#else
        copy16_async(to, from, true);
#endif
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int piece = lid + 256 * i, tile = piece / 64, k = piece / 2 % 32, c = piece % 2;
        const uint to = ws + ((tile * BLOCK_K + k) * 2 + (c ^ ((k >> 2) & 1))) * 16;
        copy16_async(to, w + ((size_t)min(first_tile + tile, N_TILES - 1) * K + step * BLOCK_K + k) * 16 + c * 8, true);
    }
}

__kernel __attribute__((reqd_work_group_size(256, 1, 1)))
void linear_prefill(__global const CAT(WEIGHT, _t)* weight, __global const CAT(X, _t)* x, __global float* out,
                    __global const int* state, const int out_row) {
    __local uint4 buffers[STAGES * STAGE_BYTES / 16];
    const uint local_base = local_address(buffers);
    const int n = state[STATE_N_TOKENS];
    const int lane = get_local_id(0) % WARP, warp = get_local_id(0) / WARP;
    const int first_token = get_group_id(0) * BLOCK_TOKENS, first_tile = get_group_id(1) * BLOCK_TILES;
    const int warp_token = warp / 4 * 64, warp_tile = warp % 4 * 2;

    float4 acc[4][4];  // [16 tokens][8 rows]
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] = 0;

#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < STEPS) fetch(local_base, x, weight, step, first_token, first_tile, n);
        copy_commit();
    }
    // What a lane gives as addresses: row (matrix & 1) * 8 + lane % 8 of a 16 x 16 piece, its half matrix / 2.
    const int row = lane & 15, half_of = lane >> 4;
    for (int step = 0; step < STEPS; ++step) {
        COPY_WAIT(STAGES - 2);
        barrier(CLK_LOCAL_MEM_FENCE);  // the step is there for all, and all have done with the buffer fetched next
        if (step + STAGES - 1 < STEPS) fetch(local_base, x, weight, step + STAGES - 1, first_token, first_tile, n);
        copy_commit();
        const uint xs = local_base + (step % STAGES) * STAGE_BYTES, ws = xs + STAGE_BYTES / 2;
#pragma unroll
        for (int kk = 0; kk < BLOCK_K / 16; ++kk) {
            uint4 a[4], b[2];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = warp_token + i * 16 + row;
                a[i] = load_matrices(xs + (r * 4 + ((kk * 2 + half_of) ^ ((r >> 1) & 3))) * 16);
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int k = kk * 16 + row;
                b[j] = load_matrices_transposed(ws + (((warp_tile + j) * BLOCK_K + k) * 2 + (half_of ^ ((k >> 2) & 1))) * 16);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    CAT(mma_, WEIGHT)(&acc[i][2 * j], a[i], b[j].x, b[j].y);
                    CAT(mma_, WEIGHT)(&acc[i][2 * j + 1], a[i], b[j].z, b[j].w);
                }
        }
    }
    // Lane (g, t) of a result holds rows t, t + 1 of tokens g and g + 8.
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int token = first_token + warp_token + i * 16 + h * 8 + lane / 4;
            if (token >= n) continue;
            __global float* y = out + (size_t)token * OUT_STRIDE + out_row;
#if EPILOGUE == EPILOGUE_SWIGLU
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int r = (first_tile + warp_tile) / 2 * 16 + j * 8 + 2 * (lane % 4);
                const float2 gate = h ? acc[i][j].zw : acc[i][j].xy, up = h ? acc[i][j + 2].zw : acc[i][j + 2].xy;
                const float2 v = GATE_VALUE(gate, exp) * up;
                if (r < N) y[r] = v.x;
                if (r + 1 < N) y[r + 1] = v.y;
            }
#else
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int r = (first_tile + warp_tile) * 16 + j * 8 + 2 * (lane % 4);
                float2 v = h ? acc[i][j].zw : acc[i][j].xy;
#if EPILOGUE == EPILOGUE_ADD
                if (r < N) v.x += y[r];
                if (r + 1 < N) v.y += y[r + 1];
#endif
                if (r < N) y[r] = v.x;
                if (r + 1 < N) y[r + 1] = v.y;
            }
#endif
        }
}

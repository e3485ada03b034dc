// Y = X W^T for the tokens of a step on any device: 64 tokens by 64 rows a work-group, staged through local memory.
// Formula and arguments as in cpu/linear_prefill.cl.
//
//   work-group (16 x 16 work-items)          each step of 16 columns k:
//        r: 4 tiles of 16 rows               xs[k][token]  = x, transposed while staging
//   t: +---+---+---+---+                     ws[k][row]    = W, as the tiles lie in memory
//   64 |   |   |   |   |   work-item (tx, ty) owns tokens 4 ty .. 4 ty + 3 and row tx of each of the 4 tiles
//      +---+---+---+---+
//
// Index space: (ceil(N_TILES / 4), ceil(n / 64)) groups of (16, 16).
// Build: WEIGHT, K (a multiple of 16), N, N_TILES, OUT_STRIDE, EPILOGUE. Local memory: 8.4 KB.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(OUT_STRIDE) || \
    !defined(EPILOGUE) || !defined(STATE_N_TOKENS)
#error "portable/linear_prefill.cl needs the build constants WEIGHT, K, N, N_TILES, OUT_STRIDE, EPILOGUE and those of the step state"
#endif
#include "common/tiles.cl"

#define BLOCK_K 16
#define BLOCK_TOKENS 64
#define BLOCK_TILES 4
#define PAD 4  // keeps the transposing writes off one bank

__kernel __attribute__((reqd_work_group_size(16, 16, 1)))
void linear_prefill(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global float* out,
                    __global const int* state, const int out_row) {
    __local float xs[BLOCK_K][BLOCK_TOKENS + PAD];
    __local float ws[BLOCK_K][BLOCK_TILES * 16];
    const int n = state[STATE_N_TOKENS];
    const int tx = get_local_id(0), ty = get_local_id(1);
    const int first_tile = get_group_id(0) * BLOCK_TILES, first_token = get_group_id(1) * BLOCK_TOKENS;

    float4 acc[BLOCK_TILES];
    for (int c = 0; c < BLOCK_TILES; ++c) acc[c] = 0;
    for (int k = 0; k < K; k += BLOCK_K) {
        // (tx, ty) stages column k + tx of four tokens, and row tx of column k + ty of four tiles.
        for (int i = 0; i < 4; ++i) {
            const int token = min(first_token + ty + 16 * i, n - 1);
            xs[tx][ty + 16 * i] = x[(size_t)token * K + k + tx];
            const int tile = min(first_tile + i, N_TILES - 1);
            ws[ty][16 * i + tx] = weight_at(weight + tile * TILE_SIZE, k + ty, tx);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
#pragma unroll
        for (int j = 0; j < BLOCK_K; ++j) {
            const float4 v = vload4(ty, xs[j]);
#pragma unroll
            for (int c = 0; c < BLOCK_TILES; ++c) acc[c] += v * ws[j][16 * c + tx];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    for (int c = 0; c < BLOCK_TILES; ++c) {
        float y[4];
#if EPILOGUE == EPILOGUE_SWIGLU
        if (c % 2) continue;
        vstore4(GATE_VALUE(acc[c], exp) * acc[c + 1], 0, y);
        const int row = (first_tile + c) / 2 * 16 + tx;
#else
        vstore4(acc[c], 0, y);
        const int row = (first_tile + c) * 16 + tx;
#endif
        if (row >= N) continue;
        for (int i = 0; i < 4; ++i) {
            const int token = first_token + 4 * ty + i;
            if (token >= n) break;
            __global float* p = out + (size_t)token * OUT_STRIDE + out_row + row;
#if EPILOGUE == EPILOGUE_ADD
            y[i] += *p;
#endif
            *p = y[i];
        }
    }
}

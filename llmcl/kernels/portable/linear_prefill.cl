// Y = X W^T for a step's tokens on any device: a tokens-by-rows block per work-group, a tile in the block per work-item.
// Formula and arguments as in cpu/linear_prefill.cl.
//
// How the work-items share a block: portable/block_product.cl.
//
// Index space: (ceil(N_TILES / BLOCK_TILES), ceil(n / (16 ITEM_TOKENS))) groups, local size (16, 16).
// Build: WEIGHT, K (a multiple of 16), N, N_TILES, OUT_STRIDE, EPILOGUE, ITEM_TOKENS and ITEM_ROWS (4 or 8).
// Local memory: 2048 (ITEM_TOKENS + ITEM_ROWS) + 1024 bytes.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(OUT_STRIDE) || \
    !defined(EPILOGUE) || !defined(ITEM_TOKENS) || !defined(ITEM_ROWS) || !defined(STATE_N_TOKENS)
#error "portable/linear_prefill.cl needs the build constants WEIGHT, K, N, N_TILES, OUT_STRIDE, EPILOGUE, ITEM_TOKENS, ITEM_ROWS and those of the step state"
#endif
#include "common/tiles.cl"
#include "portable/block_product.cl"

__kernel REQUIRE_ITEMS
void linear_prefill(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global float* out,
                    __global const int* state, const int out_row) {
    __local float xs[2 * XS_FLOATS] __attribute__((aligned(16)));
    __local float ws[2 * WS_FLOATS] __attribute__((aligned(16)));
    const int n = state[STATE_N_TOKENS];
    const int tx = get_local_id(0), ty = get_local_id(1), lid = ty * 16 + tx;
    const int first_tile = get_group_id(0) * BLOCK_TILES, first_token = get_group_id(1) * BLOCK_TOKENS;
    __global const CAT(WEIGHT, _t)* tile = weight + min(first_tile + lid / 32 % BLOCK_TILES, N_TILES - 1) * TILE_SIZE;
    __global const float* tokens[TOKEN_SHARES];
#pragma unroll
    for (int i = 0; i < TOKEN_SHARES; ++i)
        tokens[i] = x + (size_t)min(first_token + lid / 4 + 64 * i, n - 1) * K + lid % 4 * 4;
    run acc[ITEM_TOKENS][2];
    multiply_block(acc, tile, tokens, first_token + ITEM_TOKENS * ty < n, xs, ws, tx, ty);

    const int tile_pair = tx * RUN / 16, first_in_tile = tx * RUN % 16;
#pragma unroll
    for (int i = 0; i < ITEM_TOKENS; ++i) {
        const int token = first_token + ITEM_TOKENS * ty + i;
        if (token >= n) continue;
        __global float* p = out + (size_t)token * OUT_STRIDE + out_row;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#if EPILOGUE == EPILOGUE_SWIGLU
            if (h == 1) continue;
            const run y = GATE_VALUE(acc[i][0], exp) * acc[i][1];
            const int row = (first_tile / 2 + tile_pair) * 16 + first_in_tile;
#else
            const run y = acc[i][h];
            const int row = (first_tile + 2 * tile_pair + h) * 16 + first_in_tile;
#endif
            float values[RUN];
            CAT(vstore, RUN)(y, 0, values);
            for (int r = 0; r < RUN; ++r) {
                if (row + r >= N) continue;
#if EPILOGUE == EPILOGUE_ADD
                values[r] += p[row + r];
#endif
                p[row + r] = values[r];
            }
        }
    }
}

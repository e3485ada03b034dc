// Multiplies many tokens by their experts on any device: a work-group processes a token block for one expert.
//
//   out[i][r] = sum_k W[e][r][k] x[i / SLOTS][k] (+ bias),   i = order[first ..], e the block's expert
//   EPILOGUE: SWIGLU out[i][r] = GATE(gate[r]) up[r], tiles alternate gate, up;  STORE out[i][r] = weights[i] times the sum
//
// weight  tiles (tiles.cl) for experts first_expert .. first_expert + N_EXPERTS - 1, EXPERT_TILES each; other experts' out is unchanged
// x       float [n][K], rows for n SLOTS slots                    order, blocks  see portable/group_by_expert.cl
// weights float [n SLOTS], not read with SWIGLU                   out            float [n SLOTS][N]
//
// bias    float [experts][EXPERT_TILES 16], with BIAS, gate before up (expert_bias.cl)
//
// Index space: (ceil(EXPERT_TILES / ITEM_ROWS), blocks) groups, local size (16, 16). Work sharing in a block: portable/block_product.cl.
// Build: WEIGHT, K, N (both multiples of 16), N_EXPERTS, EXPERT_TILES, SLOTS, EPILOGUE, GATE, ITEM_TOKENS (BLOCK_ROWS / 16:
// 4), ITEM_ROWS (4 or 8).
// Local memory: 2048 (ITEM_TOKENS + ITEM_ROWS) + 1024 bytes.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_EXPERTS) || !defined(EXPERT_TILES) || !defined(SLOTS) || \
    !defined(EPILOGUE) || !defined(ITEM_TOKENS) || !defined(ITEM_ROWS)
#error "portable/experts_prefill.cl needs the build constants WEIGHT, K, N, N_EXPERTS, EXPERT_TILES, SLOTS, EPILOGUE, ITEM_TOKENS, ITEM_ROWS"
#endif
#include "common/tiles.cl"
#include "common/expert_bias.cl"
#include "portable/block_product.cl"

__kernel REQUIRE_ITEMS
void experts_prefill(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global const int* order,
                     __global const int4* blocks, __global const float* weights, __global float* out,
                     const int first_expert BIAS_PARAM) {
    __local float xs[2 * XS_FLOATS] __attribute__((aligned(16)));
    __local float ws[2 * WS_FLOATS] __attribute__((aligned(16)));
    const int4 block = blocks[get_group_id(1)];
    const int expert = block.x - first_expert, n = block.z;
    if (n == 0 || expert < 0 || expert >= N_EXPERTS) return;
    const int tx = get_local_id(0), ty = get_local_id(1), lid = ty * 16 + tx;
    const int first_tile = get_group_id(0) * BLOCK_TILES;
    order += block.y;
    weight += (size_t)expert * EXPERT_TILES * TILE_SIZE;
    __global const CAT(WEIGHT, _t)* tile = weight + min(first_tile + lid / 32 % BLOCK_TILES, EXPERT_TILES - 1) * TILE_SIZE;
    __global const float* tokens[TOKEN_SHARES];
#pragma unroll
    for (int i = 0; i < TOKEN_SHARES; ++i)
        tokens[i] = x + (size_t)(order[min(lid / 4 + 64 * i, n - 1)] / SLOTS) * K + lid % 4 * 4;
    run acc[ITEM_TOKENS][2];
    multiply_block(acc, tile, tokens, ITEM_TOKENS * ty < n, xs, ws, tx, ty);

#if BIAS
    bias += (size_t)block.x * EXPERT_TILES * 16;
#endif
    const int tile_pair = tx * RUN / 16, first_in_tile = tx * RUN % 16;
#pragma unroll
    for (int i = 0; i < ITEM_TOKENS; ++i) {
        // No `continue`: after the return above PoCL 3.0 goes on all the same.
        const bool is_there = ITEM_TOKENS * ty + i < n;
        const int slot = order[min(ITEM_TOKENS * ty + i, n - 1)];
        __global float* p = out + (size_t)slot * N;
#if EPILOGUE == EPILOGUE_SWIGLU
        const int row = (first_tile / 2 + tile_pair) * 16 + first_in_tile;
#if BIAS
        const int from = min(row, N - RUN);
        acc[i][0] += CAT(vload, RUN)(0, bias + from);
        acc[i][1] += CAT(vload, RUN)(0, bias + N + from);
#endif
        if (is_there && row < N) CAT(vstore, RUN)(APPLY_GATE(acc[i][0], acc[i][1], exp, run), 0, p + row);
#else
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = (first_tile + 2 * tile_pair + h) * 16 + first_in_tile;
#if BIAS
            acc[i][h] += CAT(vload, RUN)(0, bias + min(row, N - RUN));
#endif
            if (is_there && row < N) CAT(vstore, RUN)(acc[i][h] * weights[slot], 0, p + row);
        }
#endif
    }
}

// A product of many tokens with the experts that they go to on a CPU with 8-bit dot products: quantised weights, activations of
// cpu/quantize_expert_rows.cl in place of x and `order` for the outputs alone.
// Formula and arguments as in portable/experts_prefill.cl; a tile times TILE_TOKENS tokens: cpu/packed_product.cl.
//
// Index space: (EXPERT_TILES / TILE_COLS, blocks), local size 1.
// Build: WEIGHT, K, N (both multiples of 16), N_EXPERTS, EXPERT_TILES, SLOTS, EPILOGUE, GATE, DOT > 0, TILE_TOKENS, TAIL_TOKENS,
// BLOCK_TILES, TILE_COLS (1; 2 with SWIGLU).
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_EXPERTS) || !defined(EXPERT_TILES) || \
    !defined(EPILOGUE) || !defined(DOT) || !defined(TILE_TOKENS) || !defined(TAIL_TOKENS) || !defined(BLOCK_TILES) || !defined(TILE_COLS)
#error "cpu/experts_prefill_int8.cl needs the build constants WEIGHT, K, N, N_EXPERTS, EXPERT_TILES, EPILOGUE, DOT, TILE_TOKENS, TAIL_TOKENS, BLOCK_TILES, TILE_COLS"
#endif
#include "cpu/quant_tile.cl"
#include "common/expert_bias.cl"
#include "cpu/packed_activations.cl"
#include "cpu/packed_product.cl"

// The tiles at `weight`, from number `tile` of the expert on, for the first min(n, rows) of the slots in `order`.
IN_REGISTERS inline void multiply_slots(__global const uchar* weight, __global const int* x, __global const int* order,
                                        __global const float* weights, __global float* out, const int tile, const int n,
                                        const int rows BIAS_PARAM) {
    float16 acc[TILE_COLS][TILE_TOKENS];
    for (int c = 0; c < TILE_COLS; ++c) multiply_tile(weight + c * TILE_SIZE, x, acc[c], rows);
    for (int i = 0; i < rows && i < n; ++i) {
        const int slot = order[i];
        __global float* y = out + (size_t)slot * N;
#if EPILOGUE == EPILOGUE_SWIGLU
#if BIAS
        acc[0][i] += load16_f32(bias + tile / 2 * 16);
        acc[1][i] += load16_f32(bias + N + tile / 2 * 16);
#endif
        store16_f32(APPLY_GATE(acc[0][i], acc[1][i], exp16, float16), y + tile / 2 * 16);
#else
        for (int c = 0; c < TILE_COLS; ++c) {
#if BIAS
            acc[c][i] += load16_f32(bias + (tile + c) * 16);
#endif
            store16_f32(acc[c][i] * weights[slot], y + (tile + c) * 16);
        }
#endif
    }
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void experts_prefill(__global const uchar* weight, __global const int* x, __global const int* order,
                     __global const int4* blocks, __global const float* weights, __global float* out,
                     const int first_expert BIAS_PARAM) {
    const int4 block = blocks[get_group_id(1)];
    const int expert = block.x - first_expert, n = block.z;
    if (n == 0 || expert < 0 || expert >= N_EXPERTS) return;
    const int tile = get_group_id(0) * TILE_COLS;
    order += block.y;
#if BIAS
    bias += (size_t)block.x * EXPERT_TILES * 16;
#endif
    weight += ((size_t)expert * EXPERT_TILES + tile) * TILE_SIZE;
    x += get_group_id(1) * BLOCK_TILES * (size_t)(K / 32) * BLOCK8;
    for (int t = 0; t < n; t += TILE_TOKENS, x += (size_t)(K / 32) * BLOCK8) {
        if (n - t > TAIL_TOKENS)
            multiply_slots(weight, x, order + t, weights, out, tile, n - t, TILE_TOKENS BIAS_ARG);
        else
            multiply_slots(weight, x, order + t, weights, out, tile, n - t, TAIL_TOKENS BIAS_ARG);
    }
}

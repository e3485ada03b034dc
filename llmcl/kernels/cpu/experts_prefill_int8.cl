// Multiplies many tokens by their experts on a CPU with 8-bit dot products: quantised weights.
// Formula and arguments as in portable/experts_prefill.cl, except x: rows in 8 bits, stored separately (cpu/packed_activations.cl).
//
// Index space: (parts, blocks), local size 1; part g of G takes its expert's tiles U g / G .. U (g + 1) / G, TILE_COLS
// at once; the expert has U tiles. 12, 10, 8, 6, 4 or 2 tokens are computed at once (cpu/packed_product.cl), TILE_TOKENS at most.
// Build: WEIGHT, K, N (both multiples of 16), N_EXPERTS, EXPERT_TILES, SLOTS, EPILOGUE, GATE, DOT > 0, TILE_TOKENS (6, 8 or 12),
// TILE_COLS (1; 2 with SWIGLU).
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_EXPERTS) || !defined(EXPERT_TILES) || !defined(SLOTS) || \
    !defined(EPILOGUE) || !defined(DOT) || !defined(TILE_TOKENS) || !defined(TILE_COLS)
#error "cpu/experts_prefill_int8.cl needs the build constants WEIGHT, K, N, N_EXPERTS, EXPERT_TILES, SLOTS, EPILOGUE, DOT, TILE_TOKENS, TILE_COLS"
#endif
#define ROWS_APART
#include "cpu/quant_tile.cl"
#include "common/expert_bias.cl"
#include "cpu/packed_activations.cl"
#include "cpu/packed_product.cl"

// Multiplies the tiles at `weight`, the expert's number `tile` and on, by the first min(n, rows) slots in `order`.
IN_REGISTERS inline void multiply_slots(__global const uchar* weight, __global const int* x, __global const int* order,
                                        __global const float* weights, __global float* out, const int tile, const int n,
                                        const int rows BIAS_PARAM) {
    // Rows past the last slot repeat the last slot: computed, never stored.
    __global const int* tokens[TILE_TOKENS];
#pragma unroll
    for (int i = 0; i < rows; ++i) tokens[i] = x + (size_t)(order[min(i, n - 1)] / SLOTS) * (K / 32 * ROW8);
    float16 acc[TILE_COLS][TILE_TOKENS];
    for (int c = 0; c < TILE_COLS; ++c) multiply_tile(weight + c * TILE_SIZE, tokens, acc[c], rows);
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
    const int units = EXPERT_TILES / TILE_COLS;
    const int first = units * get_group_id(0) / get_num_groups(0) * TILE_COLS;
    const int last = units * (get_group_id(0) + 1) / get_num_groups(0) * TILE_COLS;
    order += block.y;
#if BIAS
    bias += (size_t)block.x * EXPERT_TILES * 16;
#endif
    weight += ((size_t)expert * EXPERT_TILES + first) * TILE_SIZE;
    for (int tile = first; tile < last; tile += TILE_COLS, weight += TILE_COLS * TILE_SIZE) {
#define SLOTS_AT_ONCE(rows)                                                                   \
    do {                                                                                      \
        multiply_slots(weight, x, order + t, weights, out, tile, n - t, rows BIAS_ARG);       \
        t += (rows);                                                                          \
    } while (false)
        for (int t = 0; t < n;) {
#if TILE_TOKENS > 8
            if (n - t > 10) SLOTS_AT_ONCE(TILE_TOKENS);
            else if (n - t > 8) SLOTS_AT_ONCE(10);
            else
#endif
#if TILE_TOKENS > 6
            if (n - t > 6) SLOTS_AT_ONCE(8);
            else
#endif
            if (n - t > 4) SLOTS_AT_ONCE(6);
            else if (n - t > 2) SLOTS_AT_ONCE(4);
            else SLOTS_AT_ONCE(2);
        }
    }
}

// Multiplies many tokens by their experts on a CPU: a token block for one expert per work-item.
// Formula and arguments as in portable/experts_prefill.cl; with PACKED x holds rows from norm_activations (cpu/activation_row.cl). A
// work-item walks its block as in cpu/linear_prefill.cl.
//
// Index space: (parts, blocks), local size 1; part g of G takes its expert's tiles U g / G .. U (g + 1) / G, TILE_COLS
// at once; the expert has U tiles.
// Build: WEIGHT, K, N (both multiples of 16), N_EXPERTS, EXPERT_TILES, SLOTS, EPILOGUE, GATE, TILE_COLS (divides
// EXPERT_TILES; even with SWIGLU), MOST_TOKENS (per block), and PACKED, TILE_TOKENS, TAIL_TOKENS as in cpu/linear_prefill.cl.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_EXPERTS) || !defined(EXPERT_TILES) || !defined(SLOTS) || \
    !defined(EPILOGUE) || !defined(PACKED) || !defined(TILE_TOKENS) || !defined(TAIL_TOKENS) || !defined(TILE_COLS) || !defined(MOST_TOKENS)
#error "cpu/experts_prefill.cl needs the build constants WEIGHT, K, N, N_EXPERTS, EXPERT_TILES, SLOTS, EPILOGUE, PACKED, TILE_TOKENS, TAIL_TOKENS, TILE_COLS, MOST_TOKENS"
#endif
#include "common/tiles.cl"
#include "common/expert_bias.cl"
#include "cpu/activation_row.cl"
#include "cpu/token_product.cl"

#define X_STRIDE (PACKED ? ROW_FLOATS(K) : K)

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void experts_prefill(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global const int* order,
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
    weight += (size_t)expert * EXPERT_TILES * TILE_SIZE;
    token_row rows[ROWS_PADDED];  // rows past the last repeat the last: computed, never stored
    for (int i = 0; i < ROWS_PADDED; ++i) rows[i] = x + (size_t)(order[min(i, n - 1)] / SLOTS) * X_STRIDE;
    for (int tile = first; tile < last; tile += TILE_COLS) {
        float16 sum[ROWS_PADDED][TILE_COLS];
        multiply_tokens(sum, weight + (size_t)tile * TILE_SIZE, rows, n);
        for (int i = 0; i < n; ++i) {
            const int slot = order[i];
            __global float* y = out + (size_t)slot * N;
#if EPILOGUE == EPILOGUE_SWIGLU
            for (int c = 0; c < TILE_COLS; c += 2) {
#if BIAS
                sum[i][c] += load16_f32(bias + (tile + c) / 2 * 16);
                sum[i][c + 1] += load16_f32(bias + N + (tile + c) / 2 * 16);
#endif
                store16_f32(APPLY_GATE(sum[i][c], sum[i][c + 1], exp16, float16), y + (tile + c) / 2 * 16);
            }
#else
            for (int c = 0; c < TILE_COLS; ++c) {
#if BIAS
                sum[i][c] += load16_f32(bias + (tile + c) * 16);
#endif
                store16_f32(sum[i][c] * weights[slot], y + (tile + c) * 16);
            }
#endif
        }
    }
}

// linear_prefill on packed activations (cpu/linear_prefill_bf16.cl, cpu/linear_prefill_int8.cl: formula, arguments, index space):
// a work-item's loops over units and tokens. The including file first defines
//
//   WEIGHT_ITEM, X_ITEM                  element types of weight and x
//   TILE_SIZE, TOKENS_SIZE               elements in a tile, and in TILE_TOKENS tokens
//   multiply_tile(tile, x, acc, rows)    acc (float16 [TILE_TOKENS]) = a tile's products with `rows` (a constant) tokens
//   with OUT_WEIGHT  quantize_numbers (cpu/quantize_row.cl): out is in 8-bit blocks for the next product, not in float
#include "cpu/store_rows.cl"

// Computes a whole unit for the tokens t .. min(t + rows, end) - 1.
IN_REGISTERS inline void multiply_unit(__global const WEIGHT_ITEM* weight, __global const X_ITEM* x, __global float* out,
                                       const int unit, const int t, const int end, const int rows, const int n_rows,
                                       const int out_stride) {
    weight += (size_t)unit * TILE_COLS * TILE_SIZE;
    x += (size_t)(t / TILE_TOKENS) * TOKENS_SIZE;
    float16 acc[TILE_COLS][TILE_TOKENS];
    for (int c = 0; c < TILE_COLS; ++c) multiply_tile(weight + (size_t)c * TILE_SIZE, x, acc[c], rows);
#ifdef OUT_WEIGHT
    __global int* block = (__global int*)out + ((size_t)(t / TILE_TOKENS) * (out_stride / 32) + unit) * BLOCK8;
    for (int i = 0; i < rows && t + i < end; ++i)
        quantize_numbers(GATE_VALUE(acc[0][i], exp16) * acc[1][i], GATE_VALUE(acc[2][i], exp16) * acc[3][i], 1.0f, block, i);
#else
    out += (size_t)t * out_stride;
    for (int i = 0; i < rows && t + i < end; ++i, out += out_stride) {
#if EPILOGUE == EPILOGUE_SWIGLU
        store_rows(GATE_VALUE(acc[0][i], exp16) * acc[1][i], out, unit * 16, n_rows, out_stride);
#else
        for (int c = 0; c < TILE_COLS; ++c) store_rows(acc[c][i], out, (unit * TILE_COLS + c) * 16, n_rows, out_stride);
#endif
    }
#endif
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void linear_prefill(__global const WEIGHT_ITEM* weight, __global const X_ITEM* x, __global float* out,
                    __global const int* state, const int out_row, const int n_rows, const int n_tiles, const int out_stride) {
    const int units = n_tiles / TILE_COLS;
    const int first = (int)((long)units * get_group_id(0) / get_num_groups(0));
    const int last = (int)((long)units * (get_group_id(0) + 1) / get_num_groups(0));
    const int end = min(state[STATE_N_TOKENS], (int)(get_group_id(1) + 1) * GROUP_TOKENS);
#ifdef OUT_WEIGHT
    out += out_row / 32 * BLOCK8;
#else
    out += out_row;
#endif
    for (int unit = first; unit < last; ++unit) {
        for (int t = get_group_id(1) * GROUP_TOKENS; t < end; t += TILE_TOKENS) {
            const int left = end - t;
            // Not a loop over the multiples: PoCL unrolls such a loop too late to keep sums in registers.
            if (left > TILE_TOKENS - TAIL_STEP) multiply_unit(weight, x, out, unit, t, end, TILE_TOKENS, n_rows, out_stride);
#if TAIL_STEP < TILE_TOKENS
            else if (left <= TAIL_STEP) multiply_unit(weight, x, out, unit, t, end, TAIL_STEP, n_rows, out_stride);
#if 2 * TAIL_STEP < TILE_TOKENS
            else if (left <= 2 * TAIL_STEP) multiply_unit(weight, x, out, unit, t, end, 2 * TAIL_STEP, n_rows, out_stride);
            else multiply_unit(weight, x, out, unit, t, end, 3 * TAIL_STEP, n_rows, out_stride);
#endif
#endif
        }
    }
}

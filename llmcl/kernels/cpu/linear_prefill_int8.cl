// Y = X W^T for the tokens of a step on a CPU with 8-bit dot products: quantised weights, activations of quantize_activations.
//
//   y[t][r] as in cpu/quant_tile.cl;   EPILOGUE as in cpu/linear_decode.cl (SWIGLU: tiles alternate gate, up)
//
// weight   tiles of WEIGHT (tiles.cl)      x  the step's activations in blocks of 8 bits (cpu/packed_activations.cl)
// out      float [n][OUT_STRIDE], columns out_row .. out_row + N - 1
//
// Index space: (streams, ceil(n / GROUP_TOKENS)), local size 1; stream g takes units g U / G .. (g + 1) U / G, as in
// cpu/linear_decode.cl, a unit being TILE_COLS tiles. Of a unit TILE_TOKENS tokens are computed at once (cpu/packed_product.cl);
// where at most TAIL_TOKENS are left, so many.
//
// Build: WEIGHT, K, N, N_TILES, OUT_STRIDE, EPILOGUE, DOT > 0, TILE_TOKENS, TILE_COLS (1; 2 with SWIGLU), GROUP_TOKENS (a
// multiple of TILE_TOKENS), TAIL_TOKENS (0: none).
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(OUT_STRIDE) || \
    !defined(EPILOGUE) || !defined(DOT) || !defined(TILE_TOKENS) || !defined(TILE_COLS) || !defined(GROUP_TOKENS) || \
    !defined(TAIL_TOKENS) || !defined(STATE_N_TOKENS)
#error "cpu/linear_prefill_int8.cl needs the build constants WEIGHT, K, N, N_TILES, OUT_STRIDE, EPILOGUE, DOT, TILE_TOKENS, TILE_COLS, GROUP_TOKENS, TAIL_TOKENS and those of the step state"
#endif
#include "cpu/quant_tile.cl"
#include "cpu/packed_activations.cl"
#include "cpu/packed_product.cl"
#include "cpu/store_rows.cl"

// All of a unit for the tokens t .. min(t + rows, end) - 1.
IN_REGISTERS inline void multiply_unit(__global const uchar* weight, __global const int* x, __global float* out, const int unit,
                                       const int t, const int end, const int rows) {
    weight += (size_t)unit * TILE_COLS * TILE_SIZE;
    x += (size_t)(t / TILE_TOKENS) * (K / 32) * BLOCK8;
    out += (size_t)t * OUT_STRIDE;
    float16 acc[TILE_COLS][TILE_TOKENS];
    for (int c = 0; c < TILE_COLS; ++c) multiply_tile(weight + c * TILE_SIZE, x, acc[c], rows);
    for (int i = 0; i < rows && t + i < end; ++i, out += OUT_STRIDE) {
#if EPILOGUE == EPILOGUE_SWIGLU
        store_rows(GATE_VALUE(acc[0][i], exp16) * acc[1][i], out, unit * 16);
#else
        for (int c = 0; c < TILE_COLS; ++c) store_rows(acc[c][i], out, (unit * TILE_COLS + c) * 16);
#endif
    }
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void linear_prefill(__global const uchar* weight, __global const int* x, __global float* out, __global const int* state,
                    const int out_row) {
    const int units = N_TILES / TILE_COLS;
    const int first = (int)((long)units * get_group_id(0) / get_num_groups(0));
    const int last = (int)((long)units * (get_group_id(0) + 1) / get_num_groups(0));
    const int end = min(state[STATE_N_TOKENS], (int)(get_group_id(1) + 1) * GROUP_TOKENS);
    out += out_row;
    for (int unit = first; unit < last; ++unit) {
        for (int t = get_group_id(1) * GROUP_TOKENS; t < end; t += TILE_TOKENS) {
            if (end - t > TAIL_TOKENS)
                multiply_unit(weight, x, out, unit, t, end, TILE_TOKENS);
            else
                multiply_unit(weight, x, out, unit, t, end, TAIL_TOKENS);
        }
    }
}

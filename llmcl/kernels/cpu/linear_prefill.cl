// Y = X W^T for a step's tokens on a CPU, in float32: a register tile of TILE_TOKENS tokens by TILE_COLS 16-row tiles.
//
//   y[t][r] = sum_k x[t][k] W[r][k];   EPILOGUE as in cpu/linear_decode.cl (SWIGLU: tiles alternate gate, up)
//
// weight  n_tiles tiles (tiles.cl)    out  float [n][out_stride], columns out_row .. out_row + n_rows - 1
// x       float [n][K]; with PACKED rows from norm_activations (cpu/activation_row.cl), with a scale that multiplies y
//
// Index space: (n_tiles / TILE_COLS, ceil(n / MOST_TOKENS)), local size 1. A work-item walks its MOST_TOKENS tokens
// while its weights (TILE_COLS * 16 rows) stay in the core's cache:
//
//                   r: TILE_COLS * 16
//                  +-----------------+
//   t: TILE_TOKENS | acc in registers|  x[t][k] is broadcast, 16 rows of W are one vector
//                  +-----------------+
//
// A token's y has the same bits in cpu/linear_decode.cl (cpu/token_product.cl).
//
// Build: WEIGHT, K, EPILOGUE, PACKED (required if WEIGHT groups have a minimum), TILE_TOKENS, TAIL_TOKENS (fewer), TILE_COLS (divides
// n_tiles; even with SWIGLU), MOST_TOKENS. The row count is an argument, as in cpu/linear_decode.cl.
#if !defined(WEIGHT) || !defined(K) || !defined(EPILOGUE) || !defined(PACKED) || !defined(TILE_TOKENS) || \
    !defined(TAIL_TOKENS) || !defined(TILE_COLS) || !defined(MOST_TOKENS) || !defined(STATE_N_TOKENS)
#error "cpu/linear_prefill.cl needs the build constants WEIGHT, K, EPILOGUE, PACKED, TILE_TOKENS, TAIL_TOKENS, TILE_COLS, MOST_TOKENS and those of the step state"
#endif
#include "common/tiles.cl"
#include "cpu/activation_row.cl"
#include "cpu/store_rows.cl"
#include "cpu/token_product.cl"

#define X_STRIDE (PACKED ? ROW_FLOATS(K) : K)

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void linear_prefill(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global float* out,
                    __global const int* state, const int out_row, const int n_rows, const int n_tiles, const int out_stride) {
    const int first = get_group_id(1) * MOST_TOKENS, n = min(state[STATE_N_TOKENS] - first, MOST_TOKENS);
    const int tile = get_group_id(0) * TILE_COLS;
    token_row rows[ROWS_PADDED];  // rows past the last repeat the last: computed, never stored
    for (int i = 0; i < ROWS_PADDED; ++i) rows[i] = x + (size_t)(first + min(i, n - 1)) * X_STRIDE;
    float16 sum[ROWS_PADDED][TILE_COLS];
    multiply_tokens(sum, weight + tile * TILE_SIZE, rows, n);
    out += out_row + (size_t)first * out_stride;
    for (int i = 0; i < n; ++i, out += out_stride) {
        const float scale = PACKED ? rows[i][SCALE_AT(K)] : 1.0f;
        for (int c = 0; c < TILE_COLS; ++c) {
            float16 y = sum[i][c] * scale;
#if EPILOGUE == EPILOGUE_SWIGLU
            const float16 up = sum[i][++c] * scale;
            y = GATE_VALUE(y, exp16) * up;
            store_rows(y, out, (tile + c) / 2 * 16, n_rows, out_stride);
#else
            store_rows(y, out, (tile + c) * 16, n_rows, out_stride);
#endif
        }
    }
}

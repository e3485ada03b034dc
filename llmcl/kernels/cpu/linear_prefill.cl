// Y = X W^T for the tokens of a step on a CPU: a register tile of TILE_TOKENS tokens by TILE_COLS 16-row tiles.
//
//   y[t][r] = sum_k x[t][k] W[r][k];   EPILOGUE as in cpu/linear_decode.cl (SWIGLU: tiles alternate gate, up)
//
// weight  n_tiles tiles (tiles.cl)    x  float [n][K]     out  float [n][out_stride], columns out_row .. out_row + n_rows - 1
//
// Index space: (n_tiles / TILE_COLS, ceil(n / GROUP_TOKENS)), local size 1. A work-item walks its GROUP_TOKENS tokens
// while its weights (TILE_COLS * 16 rows) stay in the core's cache:
//
//                   r: TILE_COLS * 16
//                  +-----------------+
//   t: TILE_TOKENS | acc in registers|  x[t][k] is broadcast, 16 rows of W are one vector
//                  +-----------------+
//
// Build: WEIGHT, K, EPILOGUE, TILE_TOKENS, TILE_COLS (divides n_tiles; even with SWIGLU), GROUP_TOKENS (a multiple of
// TILE_TOKENS). Rows are no build constant, as in cpu/linear_decode.cl.
#if !defined(WEIGHT) || !defined(K) || !defined(EPILOGUE) || !defined(TILE_TOKENS) || !defined(TILE_COLS) || \
    !defined(GROUP_TOKENS) || !defined(STATE_N_TOKENS)
#error "cpu/linear_prefill.cl needs the build constants WEIGHT, K, EPILOGUE, TILE_TOKENS, TILE_COLS, GROUP_TOKENS and those of the step state"
#endif
#include "common/tiles.cl"
#include "cpu/store_rows.cl"
#include "cpu/token_product.cl"

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void linear_prefill(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global float* out,
                    __global const int* state, const int out_row, const int n_rows, const int n_tiles, const int out_stride) {
    const int n = state[STATE_N_TOKENS];
    const int tile = get_group_id(0) * TILE_COLS;
    const int end = min(n, (int)(get_group_id(1) + 1) * GROUP_TOKENS);
    weight += tile * TILE_SIZE;
    out += out_row;
    for (int t = get_group_id(1) * GROUP_TOKENS; t < end; t += TILE_TOKENS) {
        // Rows past the last token repeat it: computed, never stored.
        __global const float* rows[TILE_TOKENS];
#pragma unroll
        for (int i = 0; i < TILE_TOKENS; ++i) rows[i] = x + (size_t)min(t + i, n - 1) * K;
        float16 acc[TILE_TOKENS][TILE_COLS];
        multiply_tokens(acc, weight, rows);
#pragma unroll
        for (int i = 0; i < TILE_TOKENS; ++i) {
            if (t + i >= end) break;
            __global float* y = out + (size_t)(t + i) * out_stride;
#if EPILOGUE == EPILOGUE_SWIGLU
#pragma unroll
            for (int c = 0; c < TILE_COLS; c += 2)
                store_rows(GATE_VALUE(acc[i][c], exp16) * acc[i][c + 1], y, (tile + c) / 2 * 16, n_rows, out_stride);
#else
#pragma unroll
            for (int c = 0; c < TILE_COLS; ++c) store_rows(acc[i][c], y, (tile + c) * 16, n_rows, out_stride);
#endif
        }
    }
}

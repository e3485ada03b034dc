// y = W x for one token on a CPU: one work-item streams a contiguous run of 16-row tiles.
//
//   y[r] = scale * sum_k W[r][k] (x[k] norm[k]),   scale = 1/sqrt(mean(x^2) + EPS) with NORM, else 1 and no norm
//   EPILOGUE: STORE out = y;  ADD out += y;  SWIGLU out[r] = GATE(gate[r]) up[r], tiles alternate gate, up
//
// weight  n_tiles tiles (tiles.cl)     x      float [n][K], used: the last of n step tokens (STATE_N_TOKENS)
// norm    float [K]                    out    float, rows out_row .. out_row + n_rows - 1 (with SWIGLU: output rows)
//
// Index space: global size = number of streams, local size 1; stream g takes tiles n_tiles g / G .. n_tiles (g+1) / G.
// Build: WEIGHT, DOT with quantised weights (cpu/quant_tile.cl), K (a multiple of 16), NORM, EPS, EPILOGUE, MOST_UNITS (at least
// n_tiles, with
// SWIGLU half). The row count is an argument: products with equal K share a program.
#if !defined(WEIGHT) || !defined(K) || !defined(NORM) || !defined(EPS) || !defined(EPILOGUE) || !defined(MOST_UNITS) || \
    !defined(STATE_N_TOKENS)
#error "cpu/linear_decode.cl needs the build constants WEIGHT, K, NORM, EPS, EPILOGUE, MOST_UNITS and those of the step state"
#endif
#include "common/tiles.cl"
#include "cpu/unit.cl"
#include "cpu/store_rows.cl"
#include "cpu/tile_product.cl"

#define TILES_AT_ONCE (EPILOGUE == EPILOGUE_SWIGLU ? 2 : 1)
// Number of 16-row vectors stored together.
#define PIECE PIECE_OF((int)(TILES_AT_ONCE * TILE_SIZE * sizeof(CAT(WEIGHT, _t))), MOST_UNITS)

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void linear_decode(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global const float* norm,
                   __global float* out, __global const int* state, const int out_row, const int n_rows, const int n_tiles) {
    BEGIN_UNIT;
    const int units = n_tiles / TILES_AT_ONCE;
    const int first = (int)((long)units * get_group_id(0) / get_num_groups(0));
    const int end = (int)((long)units * (get_group_id(0) + 1) / get_num_groups(0));
    x += (size_t)(state[STATE_N_TOKENS] - 1) * K;
    out += out_row;
    const float scale = scale_of_norm(x);
#if QUANTIZED
    activations activated;
    activate(x, norm, &activated);
#endif
    for (int piece = first + PIECE * PIECES_STORED; piece < end; piece += PIECE) {
        const int n = min(PIECE, end - piece);
        float16 y[PIECE];
        for (int i = 0; i < n; ++i) {
            __global const CAT(WEIGHT, _t)* w = weight + (size_t)(piece + i) * TILES_AT_ONCE * TILE_SIZE;
#if EPILOGUE == EPILOGUE_SWIGLU
            const float16 gate = DOT_TILE(w) * scale;
            const float16 up = DOT_TILE(w + TILE_SIZE) * scale;
            y[i] = GATE_VALUE(gate, exp16) * up;
#else
            y[i] = DOT_TILE(w) * scale;
#endif
        }
        if (!MAY_STORE) return;
        for (int i = 0; i < n; ++i) store_rows(y[i], out, (piece + i) * 16, n_rows, 0);
        PIECE_STORED;
    }
}

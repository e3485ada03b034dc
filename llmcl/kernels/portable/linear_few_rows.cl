// Y = X W^T for few tokens on any device: a work-group multiplies a 16-row tile (two tiles with SWIGLU) by ROWS tokens.
//
//   out[t][r] = epilogue(sum_k W[r][k] x[t][k])        weight  tiles (tiles.cl)    x  float [n][K]    out  float [n][OUT_STRIDE]
//
// Index space: (ceil(n / ROWS), units) groups, local size LOCAL_SIZE. Groups with the same tiles are neighbours: a single group reads the
// tiles from memory, the rest from a cache. How the work-items share a tile: portable/few_rows_product.cl.
// Build: WEIGHT, K, N, N_TILES, OUT_STRIDE, EPILOGUE, GATE where there is one, ROWS, LOCAL_SIZE (a power of two >= 16), step state constants.
// Local memory: 4 LOCAL_SIZE (PIECE_ROWS + 1) bytes, PIECE_ROWS 8 with 16-bit weights, else 4; less with sub-groups.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(OUT_STRIDE) || !defined(EPILOGUE) || \
    !defined(ROWS) || !defined(LOCAL_SIZE) || !defined(STATE_N_TOKENS)
#error "portable/linear_few_rows.cl needs the build constants WEIGHT, K, N, N_TILES, OUT_STRIDE, EPILOGUE, ROWS, LOCAL_SIZE and those of the step state"
#endif
#define TILES_AT_ONCE (EPILOGUE == EPILOGUE_SWIGLU ? 2 : 1)
#include "portable/few_rows_product.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1))) REQUIRE_LANES
void linear_few_rows(__global const CAT(WEIGHT, _t)* weight, __global const row_t* x, __global float* out,
                    __global const int* state, const int out_row) {
    ROW_SUMS;
    const int lid = get_local_id(0), first_token = get_group_id(0) * ROWS, unit = get_group_id(1);
    const int n = state[STATE_N_TOKENS];
    const uint power = HIDDEN_POWER(n);
    __global const CAT(WEIGHT, _t)* tile = weight + (size_t)unit * TILES_AT_ONCE * TILE_SIZE;
    __global const row_t* rows[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) rows[r] = x + (size_t)min(first_token + r, n - 1) * ROW_STRIDE;
    float own[TILES_AT_ONCE][ROWS][PIECE_ROWS];
    add_rows(own, tile, rows, ROWS, lid, power);
    const int row = unit * 16 + lid;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float y = sum_of_rows(own[0][r], sums, parts, lid);
#if EPILOGUE == EPILOGUE_SWIGLU
        const float up = sum_of_rows(own[1][r], sums, parts, lid);
        y = GATE_VALUE(y, exp) * up;
#endif
        if (lid >= 16 || row >= N || first_token + r >= n) continue;
        __global float* to = out + (size_t)(first_token + r) * OUT_STRIDE + out_row + row;
        *to = EPILOGUE == EPILOGUE_ADD ? *to + y : y;
    }
}

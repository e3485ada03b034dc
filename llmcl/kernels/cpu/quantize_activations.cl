// Rounds a step's activations to 8 bits for products with quantised weights (see cpu/quant_tile.cl).
//
// x  float [n][k]     norm  float [k], with NORM     rows  8-bit blocks: see cpu/packed_activations.cl
//
// Index space: (blocks of TILE_TOKENS tokens, column parts), local size 1. Data past the last token is left unchanged.
// Build: WEIGHT (for its OFFSET), TILE_TOKENS, NORM, EPS.
#if !defined(WEIGHT) || !defined(NORM) || !defined(EPS) || !defined(STATE_N_TOKENS)
#error "cpu/quantize_activations.cl needs the build constants WEIGHT, NORM, EPS and those of the step state"
#endif
#include "common/tiles.cl"
#include "cpu/quantize_group.cl"
#include "cpu/packed_activations.cl"
#include "cpu/quantize_row.cl"

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void quantize_activations(__global const float* x, __global const float* norm, __global int* rows, __global const int* state,
                          const int k) {
    const int first = get_group_id(0) * TILE_TOKENS, n = min(state[STATE_N_TOKENS] - first, TILE_TOKENS);
    const int begin = k / 32 * get_group_id(1) / get_num_groups(1), end = k / 32 * (get_group_id(1) + 1) / get_num_groups(1);
    rows += (size_t)get_group_id(0) * (k / 32) * BLOCK8;
    for (int i = 0; i < n; ++i) quantize_row(x + (size_t)(first + i) * k, norm, k, rows, i, begin, end);
}

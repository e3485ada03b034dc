// Rounds a step's activations to bfloat16 (to nearest, ties to even) for products with bfloat16 weights.
//
// x  float [n][k]     norm  float [k], with NORM     rows  bfloat16 blocks: see cpu/packed_activations.cl
// Index space: (blocks of TILE_TOKENS tokens, column parts), local size 1. Data past the last token is left unchanged.
// k: a multiple of 16. Build: TILE_TOKENS, NORM, EPS.
#if !defined(NORM) || !defined(EPS) || !defined(STATE_N_TOKENS)
#error "cpu/pack_activations.cl needs the build constants NORM, EPS and those of the step state"
#endif
#include "common/common.cl"
#include "cpu/packed_activations.cl"

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void pack_activations(__global const float* x, __global const float* norm, __global int* rows, __global const int* state,
                      const int k) {
    const int first = get_group_id(0) * TILE_TOKENS, n = min(state[STATE_N_TOKENS] - first, TILE_TOKENS);
    const int begin = k / 16 * get_group_id(1) / get_num_groups(1), end = k / 16 * (get_group_id(1) + 1) / get_num_groups(1);
    rows += (size_t)get_group_id(0) * (k / 16) * NUMBERS;
    for (int i = 0; i < n; ++i) {
        __global const float* row = x + (size_t)(first + i) * k;
        const float scale = row_scale(row, k);
        for (int block = begin; block < end; ++block) {
            const float16 v = load_row(row, norm, 16 * block) * scale;
            *(__global ushort16*)(rows + block * NUMBERS + 8 * i) = CONVERT16(round16_bf16(v) >> 16, ushort);
        }
    }
}

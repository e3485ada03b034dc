// The activations of a step, rounded to bfloat16 (to nearest, ties to even) for products with bfloat16 weights.
//
// x  float [n][K]     norm  float [K], with NORM     rows  blocks in bfloat16: see cpu/packed_activations.cl
// Index space: one work-group of one work-item a block of TILE_TOKENS tokens; those past the last repeat it.
// Build: K (a multiple of 16), TILE_TOKENS, NORM, EPS.
#if !defined(K) || !defined(NORM) || !defined(EPS) || !defined(STATE_N_TOKENS)
#error "cpu/pack_activations.cl needs the build constants K, NORM, EPS and those of the step state"
#endif
#include "common/common.cl"
#include "cpu/packed_activations.cl"

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void pack_activations(__global const float* x, __global const float* norm, __global int* rows, __global const int* state) {
    const int first = get_group_id(0) * TILE_TOKENS, last = state[STATE_N_TOKENS] - 1;
    rows += (size_t)get_group_id(0) * (K / 16) * NUMBERS;
    for (int i = 0; i < TILE_TOKENS; ++i) {
        __global const float* row = x + (size_t)min(first + i, last) * K;
        const float scale = row_scale(row);
        for (int k = 0; k < K; k += 16) {
            const float16 v = load_row(row, norm, k) * scale;
            *(__global ushort16*)(rows + k / 16 * NUMBERS + 8 * i) = CONVERT16(round16_bf16(v) >> 16, ushort);
        }
    }
}

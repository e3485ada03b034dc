// The activations of a step, rounded to 8 bits for products with quantised weights (see cpu/quant_tile.cl).
//
// x  float [n][K]     norm  float [K], with NORM     rows  blocks in 8 bits: see cpu/packed_activations.cl
//
// Index space: (blocks of TILE_TOKENS tokens, parts of their columns), local size 1. What lies past the last token stays as it is.
// Build: WEIGHT (for its OFFSET), K, DOT > 0, TILE_TOKENS, NORM, EPS.
#if !defined(WEIGHT) || !defined(K) || !defined(DOT) || !defined(NORM) || !defined(EPS) || !defined(STATE_N_TOKENS)
#error "cpu/quantize_activations.cl needs the build constants WEIGHT, K, DOT, NORM, EPS and those of the step state"
#endif
#include "cpu/quant_tile.cl"
#include "cpu/packed_activations.cl"

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void quantize_activations(__global const float* x, __global const float* norm, __global int* rows, __global const int* state) {
    const int first = get_group_id(0) * TILE_TOKENS, n = min(state[STATE_N_TOKENS] - first, TILE_TOKENS);
    const int begin = K / 32 * get_group_id(1) / get_num_groups(1), end = K / 32 * (get_group_id(1) + 1) / get_num_groups(1);
    rows += (size_t)get_group_id(0) * (K / 32) * BLOCK8;
    for (int i = 0; i < n; ++i) {
        __global const float* row = x + (size_t)(first + i) * K;
        const float scale = row_scale(row);
        for (int g = begin; g < end; ++g) {
            __global int* block = rows + g * BLOCK8;
            char16 q[2];
            const float4 record = quantize_group(load_row(row, norm, 32 * g), load_row(row, norm, 32 * g + 16), q);
            *(__global char16*)(block + 8 * i) = q[0];
            *(__global char16*)(block + 8 * i + 4) = q[1];
            block[RECORD_AT(i, 0)] = as_int(record.x);
            block[RECORD_AT(i, 1)] = as_int(record.y);
#if WEIGHT_IS(q6_k)
            block[RECORD_AT(i, 2)] = as_int(record.z);
#else
            block[RECORD_AT(i, 2)] = as_int(record.w);
#endif
            block[RECORD_AT(i, 3)] = as_int(scale);
        }
    }
}

// The activations of a step, rounded to 8 bits for products with quantised weights (see cpu/quant_tile.cl).
//
// x  float [n][K]     norm  float [K], with NORM     rows  blocks in 8 bits: see cpu/packed_activations.cl
//
// Index space: one work-group of one work-item a block of TILE_TOKENS tokens; those past the last repeat it.
// Build: WEIGHT (for its OFFSET), K, DOT > 0, TILE_TOKENS, NORM, EPS.
#if !defined(WEIGHT) || !defined(K) || !defined(DOT) || !defined(NORM) || !defined(EPS) || !defined(STATE_N_TOKENS)
#error "cpu/quantize_activations.cl needs the build constants WEIGHT, K, DOT, NORM, EPS and those of the step state"
#endif
#include "cpu/quant_tile.cl"
#include "cpu/packed_activations.cl"

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void quantize_activations(__global const float* x, __global const float* norm, __global int* rows, __global const int* state) {
    const int first = get_group_id(0) * TILE_TOKENS, last = state[STATE_N_TOKENS] - 1;
    rows += (size_t)get_group_id(0) * (K / 32) * BLOCK8;
    for (int i = 0; i < TILE_TOKENS; ++i) {
        __global const float* row = x + (size_t)min(first + i, last) * K;
        const float scale = row_scale(row);
        __global int* block = rows;
        for (int g = 0; g < K / 32; ++g, block += BLOCK8) {
            char16 q[2];
            const float4 record = quantize_group(load_row(row, norm, 32 * g), load_row(row, norm, 32 * g + 16), q);
            *(__global char16*)(block + 8 * i) = q[0];
            *(__global char16*)(block + 8 * i + 4) = q[1];
            __global int* records = block + NUMBERS + i;
            records[0] = as_int(record.x * scale);
            records[TILE_TOKENS] = as_int(record.y);
#if WEIGHT_IS(q6_k)
            records[2 * TILE_TOKENS] = as_int(record.z);
#else
            records[2 * TILE_TOKENS] = as_int(record.w * scale);
#endif
        }
    }
}

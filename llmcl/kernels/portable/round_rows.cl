// Rounds a step's activations to 8 bits, for products with few tokens (int8_columns.cl).
//
// x  float [n][K]     rows  int [n][ROW_WORDS]: K / 4 words with four numbers each, then the bits of K / 32 scales
// Index space: (ceil(K / 32 / LOCAL_SIZE), n) groups, local size LOCAL_SIZE; a work-item rounds 32 columns. Build: WEIGHT, K, DOT, LOCAL_SIZE.
#if !defined(WEIGHT) || !defined(K) || !defined(DOT) || !defined(LOCAL_SIZE)
#error "portable/round_rows.cl needs the build constants WEIGHT, K, DOT, LOCAL_SIZE"
#endif
#define NORM 0
#include "portable/tile_pieces.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void round_rows(__global const float* x, __global int* rows) {
    const int g = get_global_id(0);
    if (g >= K / 32) return;
    __global const float4* from = (__global const float4*)(x + (size_t)get_group_id(1) * K) + 8 * g;
    __global int* row = rows + (size_t)get_group_id(1) * ROW_WORDS;
    float4 v[8];
    int numbers[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = from[j];
    row[K / 4 + g] = as_int(round_columns(v, numbers));
#pragma unroll
    for (int j = 0; j < 8; ++j) row[8 * g + j] = numbers[j];
}

// The activations of tokens in the order of their experts, rounded to 8 bits for cpu/experts_prefill_int8.cl.
//
// x      float [n][K], the rows of n SLOTS slots      order, blocks  see portable/group_by_expert.cl
// rows   for each of `blocks` BLOCK_TILES blocks of TILE_TOKENS tokens in 8 bits (cpu/packed_activations.cl)
//
// Index space: (BLOCK_TILES, blocks), local size 1. What lies past the last token stays as it is.
// Build: WEIGHT (for its OFFSET), K, DOT > 0, TILE_TOKENS, BLOCK_TILES (ceil(BLOCK_ROWS / TILE_TOKENS)), SLOTS.
#if !defined(WEIGHT) || !defined(K) || !defined(DOT) || !defined(TILE_TOKENS) || !defined(BLOCK_TILES) || !defined(SLOTS)
#error "cpu/quantize_expert_rows.cl needs the build constants WEIGHT, K, DOT, TILE_TOKENS, BLOCK_TILES, SLOTS"
#endif
#define NORM 0
#include "cpu/quant_tile.cl"
#include "cpu/packed_activations.cl"
#include "cpu/quantize_row.cl"

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void quantize_expert_rows(__global const float* x, __global const int* order, __global const int4* blocks,
                          __global int* rows) {
    const int4 block = blocks[get_group_id(1)];
    const int first = get_group_id(0) * TILE_TOKENS, n = block.z;
    if (first >= n) return;
    order += block.y;
    rows += (get_group_id(1) * BLOCK_TILES + get_group_id(0)) * (size_t)(K / 32) * BLOCK8;
    for (int i = 0; i < TILE_TOKENS && first + i < n; ++i)
        quantize_row(x + (size_t)(order[first + i] / SLOTS) * K, x, rows, i, 0, K / 32);
}

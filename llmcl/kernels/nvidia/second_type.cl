// The products of nvidia/product_quantized.cl for weights in a second quantised type beside WEIGHT, as in files that llama.cpp
// calls Q4_K_M. A matrix's `other` selects the type; the types share x, sums and registers (nvidia/pieces_of_two_types.cl).
//
// Build: OTHER_WEIGHT, MAIN_WEIGHT (equal to WEIGHT), HIDDEN, and the constants of nvidia/product_quantized.cl.
#undef WEIGHT
#define WEIGHT OTHER_WEIGHT
#define walk other_walk
#define walk_of other_walk_of
#define tile_group other_tile_group
#define group_at other_group_at
#define load_piece other_load_piece
#define load_pieces other_load_pieces
#define load_early other_load_early
#define fetch_first other_fetch_first
#define unpack other_unpack
#define widen4 other_widen4
#define scales4 other_scales4
#define scales_of other_scales_of
#define integer_of other_integer_of
#define start_of other_start_of
#define multiply_piece other_multiply_piece
#define product other_product
#include "nvidia/product_quantized.cl"  // again
#undef walk
#undef walk_of
#undef tile_group
#undef group_at
#undef load_piece
#undef load_pieces
#undef load_early
#undef fetch_first
#undef unpack
#undef widen4
#undef scales4
#undef scales_of
#undef integer_of
#undef start_of
#undef multiply_piece
#undef product
enum { OTHER_TILE_BYTES = TILE_BYTES(HIDDEN) };
#undef WEIGHT
#define WEIGHT MAIN_WEIGHT

ALWAYS_INLINE void load_next(weight_fragment* fragment, const matrix* m) {
    if (m->other)
        other_load_early(fragment, m);
    else
        load_early(fragment, m);
}

ALWAYS_INLINE void fetch_first_of(const matrix* m) {
    if (m->other)
        other_fetch_first(m);
    else
        fetch_first(m);
}

ALWAYS_INLINE void product_of(const matrix* m, const matrix* next, const target* to, const int rows, const bool normed,
                              __local const float* columns, __local float* sums, int* parity, weight_fragment* fragment) {
    if (m->other)
        other_product(m, next, to, rows, normed, columns, sums, parity, fragment);
    else
        product(m, next, to, rows, normed, columns, sums, parity, fragment);
}
#define load_early load_next
#define fetch_first fetch_first_of
#define product product_of

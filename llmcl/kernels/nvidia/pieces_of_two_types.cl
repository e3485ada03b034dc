// The pieces of nvidia/product_quantized.cl for kernels with weights in two quantised types, WEIGHT and OTHER_WEIGHT. Both use the
// same registers, so that a product of one type can request the first pieces of a product of the other type.
//
// A fragment has FRAGMENT_PIECES slots. A type with bits beside its nibbles keeps the bits in the slot after each piece. For
// super-blocks, two pieces are in flight (nvidia/product_quantized.cl):
//
//     q4_0     [ piece 0 | piece 1 | piece 2 | piece 3 ]
//     q4_k     [ piece 0 |         | piece 1 |         ]
//     q6_k     [ piece 0 | bit pairs | piece 1 | bit pairs ]
//
// The number of column groups is the larger of both types' numbers.
#include "nvidia/partition.cl"

#define FRAGMENT_PIECES (!DOT ? 2 : THREE_STEPS ? 3 : 4)
#define PIECES (HAS_HIGH_BITS ? FRAGMENT_PIECES / 2 : DOT && IS_SUPER && !THREE_STEPS ? 2 : FRAGMENT_PIECES)
#define PARTS_WITH(steps, pieces) (((steps) + (pieces) - 1) / (pieces))
#define STEPS_WITH(steps, pieces) \
    (((steps) + PARTS_WITH(steps, pieces) - 1) / PARTS_WITH(steps, pieces) * PARTS_WITH(steps, pieces))
#define MOST_STEPS(steps) \
    MAX(MAX(STEPS_WITH(steps, 1), STEPS_WITH(steps, 2)), MAX(STEPS_WITH(steps, 3), STEPS_WITH(steps, 4)))
#define GROUPS_OF(columns) (4 * ((MOST_STEPS(STEPS_OF(columns)) + 1) / 2 * 2))

typedef struct {
    uint4 quants[2];
    uint2 d, m, factors;
} piece;

typedef struct {
    piece pieces[FRAGMENT_PIECES];
} weight_fragment;
#define LAST p[1].quants
#define HIGH p[1].quants
#define PIECE_AT(i) ((i) * (FRAGMENT_PIECES / PIECES))

// Requests a warp's first fragment in either type; see nvidia/second_type.cl.
inline void load_next(weight_fragment* fragment, const matrix* m);

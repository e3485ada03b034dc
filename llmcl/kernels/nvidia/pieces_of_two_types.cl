// The pieces of nvidia/product_quantized.cl where a kernel has weights of two quantised types, WEIGHT and OTHER_WEIGHT: in the same
// registers, so that a product of one type can ask for the first pieces of one of the other.
//
// A fragment has room for as many pieces as a type without bits beside its nibbles takes. One with such bits takes half as many, and has
// them in every second place:
//
//     q4_k     [ piece 0 | piece 1 | piece 2 | piece 3 ]
//     q6_k     [ piece 0 | its bit pairs | piece 1 | its bit pairs ]
//
// And as many groups of columns as either type takes.
#include "nvidia/partition.cl"

#define PIECES ((WEIGHT_IS(q8_0) || WEIGHT_IS(q6_k) || HAS_FIFTH_BIT ? 1 : 2) * (DOT ? 2 : 1))
#define PARTS_WITH(steps, pieces) (((steps) + (pieces) - 1) / (pieces))
#define STEPS_WITH(steps, pieces) \
    (((steps) + PARTS_WITH(steps, pieces) - 1) / PARTS_WITH(steps, pieces) * PARTS_WITH(steps, pieces))
#define MOST_STEPS(steps) MAX(MAX(STEPS_WITH(steps, 1), STEPS_WITH(steps, 2)), STEPS_WITH(steps, 4))
#define GROUPS_OF(columns) (4 * ((MOST_STEPS(STEPS_OF(columns)) + 1) / 2 * 2))

typedef struct {
    uint4 quants[2];
    uint2 d, m, factors;
} piece;

#define FRAGMENT_PIECES (DOT ? 4 : 2)
typedef struct {
    piece pieces[FRAGMENT_PIECES];
} weight_fragment;
#define LAST p[1].quants
#define HIGH p[1].quants
#define PIECE_AT(i) ((i) * (FRAGMENT_PIECES / PIECES))

// Asks for a warp's first fragment of either type; see nvidia/second_type.cl.
inline void load_next(weight_fragment* fragment, const matrix* m);

// The products in nvidia/persistent_layers.cl by weight type: from nvidia/product.cl, or for quantised weights from
// nvidia/product_quantized.cl. Expert products have the prefix expert_: the same functions, or with EXPERT_WEIGHT the functions from
// nvidia/product_quantized.cl beside 16-bit weights. From here on, WEIGHT and the product macros are the experts'.
//
// Also the product of a float32 router, with ROUTER_IS_FLOAT.
//
// With OTHER_WEIGHT, the functions from nvidia/product_quantized.cl for two types, under the same names (nvidia/second_type.cl).
//
// Build: WEIGHT, EXPERT_WEIGHT (quantised), HIDDEN, MAX_COLUMNS, EXPERT_COLUMNS (maximum over expert products), those files' constants.
#if QUANTIZED
#define FLOAT_COLUMNS 0
#else
#define FLOAT_COLUMNS 1
#include "nvidia/product.cl"
#define OWN_RUNS (((HIDDEN) / RUN + WARPS - 1) / WARPS)  // runs of x per warp
enum { OWN_COLUMNS = OWN_RUNS * RUN };
#endif

#ifdef EXPERT_WEIGHT
enum {
    PRODUCT_FLOATS = COLUMN_FLOATS,      // local, for a warp's columns
    PRODUCT_SUM_FLOATS = SUM_FLOATS,     // local, for a group
    PRODUCT_SQUARES_AT = SQUARES_AT,
    STREAM_X_FOURS = STREAM_FOURS(HIDDEN),
    PRODUCT_RUN = RUN
};
#undef WEIGHT
#undef MAX_COLUMNS
#undef PIECES
#undef COLUMN_FLOATS
#undef SQUARES_AT
#undef SUM_FLOATS
#undef STREAM_FOURS
#define WEIGHT EXPERT_WEIGHT
#define MAX_COLUMNS EXPERT_COLUMNS
#define weight_fragment expert_fragment
#define load_early expert_load_early
#define fetch_first expert_fetch_first
#define places_of expert_places_of
#define receive expert_receive
#define product expert_product
#endif

#if QUANTIZED
#include "nvidia/product_quantized.cl"
#ifdef OTHER_WEIGHT
#include "nvidia/second_type.cl"
#endif
#endif

#ifdef EXPERT_WEIGHT
#undef weight_fragment
#undef load_early
#undef fetch_first
#undef places_of
#undef receive
#undef product
enum { EXPERT_FLOATS = COLUMN_FLOATS, EXPERT_SUM_FLOATS = MAX(SUM_FLOATS, HIDDEN) };
#define expert_load expert_load_early

// Converts columns from `receive` in the 16-bit product to the layout of the expert products. sums, expert_sums: sums of squares
// for both, with equal values. Called by all work-items in a group, after all earlier expert products.
inline void take_columns(__local float* columns, __local const float* sums, __local float* expert_sums) {
    const int item = this_item(), lane = item % WARP, warp = item / WARP;
#pragma unroll
    for (int i = 0; i < (OWN_COLUMNS + WARP - 1) / WARP; ++i) {
        const int own = i * WARP + lane, column = (own / PRODUCT_RUN * WARPS + warp) * PRODUCT_RUN + own % PRODUCT_RUN;
        if (own < OWN_COLUMNS && column < HIDDEN) expert_sums[column] = columns[own];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const places p = expert_places_of(HIDDEN);
#pragma unroll
    for (int i = 0; i < p.most / 2; ++i) {
        const int column = p.first + i * p.stride;
        const bool here = 2 * i < p.count;
        const float4 a = here ? vload4(0, expert_sums + column) : 0.0f, b = here ? vload4(0, expert_sums + column + 16) : 0.0f;
        put_columns(columns, lane / 4 + 8 * i, lane % 4, a, b);
    }
    warp_sync();
    if (lane == 0) expert_sums[SQUARES_AT + warp] = sums[PRODUCT_SQUARES_AT + warp];
}
#else
enum {
    PRODUCT_FLOATS = COLUMN_FLOATS,
    PRODUCT_SUM_FLOATS = SUM_FLOATS,
    PRODUCT_SQUARES_AT = SQUARES_AT,
    STREAM_X_FOURS = STREAM_FOURS(HIDDEN),
    EXPERT_FLOATS = 0,
    EXPERT_SUM_FLOATS = 0
};
#define expert_fragment weight_fragment
#define expert_receive receive
#define expert_product product
#if QUANTIZED
#define expert_load load_early
#else
#define expert_load load_first
#endif
#define take_columns(columns, sums, expert_sums)
#endif

#ifdef ROUTER_IS_FLOAT
#include "nvidia/router.cl"
#endif

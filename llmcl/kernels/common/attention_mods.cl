// Hooks for user functions in every attention kernel: change a score, or hide keys from a query.
//
//   float score_mod(float score, int b, int h, int q_idx, int kv_idx)      int mask_mod(int b, int h, int q_idx, int kv_idx)
//   int mask_block(int b, int h, int q_first, int q_last, int kv_first, int kv_last): mask_mod over a block of positions
//
// Source: Dong et al., "Flex Attention" (2024). The host traces Python functions into OpenCL functions and puts the text in front
// of the program, with HAS_SCORE_MOD or HAS_MASK_MOD. MOD_PARAMS and MOD_ARGS pass the arrays read by the functions. SCALAR_MODS
// holds mask_mod and mask_block, SCORE_MOD_BODY holds score_mod's body, and WIDE_MODS holds score_mod16 and mask_mod16 for kernels
// with 16 keys at a time.
//
// b is a sequence's place in its batch, or the batch index with attention on arrays. MODS_BY_SEQUENCE: a function reads b.
//
// SMALL_INTS: every int converted to float by a score_mod is below 2^22 in magnitude. Then two additions do the conversion: a GPU
// converts at an eighth of the rate of additions.
#ifndef HAS_SCORE_MOD
#define HAS_SCORE_MOD 0
#endif
#ifndef HAS_MASK_MOD
#define HAS_MASK_MOD 0
#endif
#ifndef MODS_BY_SEQUENCE
#define MODS_BY_SEQUENCE 0
#endif
// The place of the sequence that owns `state`; a constant if no function reads b.
#if MODS_BY_SEQUENCE
#define MOD_SEQUENCE(state) ((state)[STATE_PLACE])
#else
#define MOD_SEQUENCE(state) 0
#endif
#ifndef MOD_PARAMS
#define MOD_PARAMS
#define MOD_ARGS
#endif

#if SMALL_INTS
#undef FLOAT_OF
#define FLOAT_OF(x) (as_float((x) + 0x4b400000) - 12582912.0f)  // 1.5 * 2^23
#endif

#if HAS_SCORE_MOD || HAS_MASK_MOD
SCALAR_MODS
#endif
#if HAS_SCORE_MOD
inline float score_mod(const float score, const int b, const int h, const int q_idx, const int kv_idx MOD_PARAMS) SCORE_MOD_BODY
#endif

#define TILE_EMPTY 0    // no query of the tile sees a key: skip the tile
#define TILE_PARTIAL 1  // ask mask_mod for each pair
#define TILE_FULL 2     // every query sees every key

// Classifies the tile: queries q.x to q.y (both included), n_heads heads from h on, keys kv_first to before kv_end.
inline int tile_class(const int b, const int h, const int n_heads, const int2 q, const int kv_first,
                      const int kv_end MOD_PARAMS) {
#if HAS_MASK_MOD
    const int seen = mask_block(b, h, q.x, q.y, kv_first, kv_end - 1 MOD_ARGS);
#if MASK_PER_HEAD
    for (int i = 1; i < n_heads; ++i)
        if (mask_block(b, h + i, q.x, q.y, kv_first, kv_end - 1 MOD_ARGS) != seen) return TILE_PARTIAL;
#endif
    return seen;
#else
    return TILE_FULL;
#endif
}

// Returns the first key after the hidden keys at the beginning, rounded down to a multiple of `tile`, before kv_end.
inline int first_visible(const int b, const int h, const int n_heads, const int2 q, const int kv_end,
                         const int tile MOD_PARAMS) {
    int first = 0;
#if HAS_MASK_MOD
    for (int step = 4096; step >= tile; step /= 4)
        while (first < kv_end && tile_class(b, h, n_heads, q, first, min(first + step, kv_end) MOD_ARGS) == TILE_EMPTY)
            first += step;
#endif
    return min(first, (kv_end - 1) / tile * tile);
}

// A token's row in the latent attention cache: [ latent: RANK | rotated key: HEAD_DIM - RANK ]. All query heads share the row. The
// whole row is the key, the latent is the value. Rows are stored like values (kv_cache.cl), so the cache has a single copy.
//
// Below, `tiles` points at a tile with 16 rows, and row i counts from the tile's first row.
//
// Build: constants of kv_cache.cl, RANK (a multiple of 16, like HEAD_DIM).
#if !defined(RANK)
#error "latent_row.cl needs the build constant RANK"
#endif
#include "common/kv_cache.cl"

#if KV_QUANTIZED
#define LATENT_NUMBERS(tiles, i, c) ((tiles) + (i) / 16 * KV_TILE + 32 * KV_GROUPS + (i) % 16 * HEAD_DIM + (c))
#define LATENT_SCALE(tiles, i, c) kv_scale((tiles) + (i) / 16 * KV_TILE, (c) / 32 * 16 + (i) % 16)

// Returns columns c .. c+15 of row i; c is a multiple of 16.
inline float16 latent16(__global const kv_t* tiles, const int i, const int c) {
    const char16 numbers = *(__global const char16*)LATENT_NUMBERS(tiles, i, c);
    return CONVERT16(numbers, float) * LATENT_SCALE(tiles, i, c);
}
#else
inline float16 latent16(__global const kv_t* tiles, const int i, const int c) {
    return CAT(load16_, KV)(tiles + i * HEAD_DIM + c);
}
#endif

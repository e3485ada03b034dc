// A token's row in the cache of latent attention: [ latent: RANK | rotated key: HEAD_DIM - RANK ]. All query heads share it. The whole
// row is the key, the latent the value. Rows lie as values do (kv_cache.cl), so there is one copy of both.
//
// Below, `tiles` points at a tile of 16 rows, and row i is counted from it.
//
// Build: those of kv_cache.cl, RANK (a multiple of 16; HEAD_DIM is one, too).
#if !defined(RANK)
#error "latent_row.cl needs the build constant RANK"
#endif
#include "common/kv_cache.cl"

#if KV_QUANTIZED
#define LATENT_NUMBERS(tiles, i, c) ((tiles) + (i) / 16 * KV_TILE + 32 * KV_GROUPS + (i) % 16 * HEAD_DIM + (c))
#define LATENT_SCALE(tiles, i, c) kv_scale((tiles) + (i) / 16 * KV_TILE, (c) / 32 * 16 + (i) % 16)

// Columns c .. c+15 of row i; c is a multiple of 16.
inline float16 latent16(__global const kv_t* tiles, const int i, const int c) {
    const char16 numbers = *(__global const char16*)LATENT_NUMBERS(tiles, i, c);
    return CONVERT16(numbers, float) * LATENT_SCALE(tiles, i, c);
}
#else
inline float16 latent16(__global const kv_t* tiles, const int i, const int c) {
    return CAT(load16_, KV)(tiles + i * HEAD_DIM + c);
}
#endif

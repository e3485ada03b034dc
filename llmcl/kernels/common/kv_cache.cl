// The storage layout of keys and values in the cache, and functions to read and append: the hook for the KV dtype.
//
//   f32, f16, bf16  keys [CAPACITY/16][HEAD_DIM][16]        values [CAPACITY][HEAD_DIM]
//   q8_0            x ~ q d: 32 dimensions of a key or a value share d = max |x| / 127 (half); q = round(x / d), 8 bits
//       keys        [CAPACITY/16][HEAD_DIM/32] { 16 half d; 8 vectors: vector j = 16 keys x dimensions 4j .. 4j+3, q + 128 }
//       values      [CAPACITY/16] { [HEAD_DIM/32][16] half d; [16][HEAD_DIM] q }
//
//   bf16x2          in prefill on a CPU only, never for the cache itself: see cpu/pair_cache.cl
//
// For each KV head, 16 keys take KV_TILE consecutive elements, and so do 16 values. (docs/design/layouts.md has drawings; q8_0 keys
// are stored like q8_0 weights, see tiles.cl.) Below, `tiles` points at a tile, and row i counts from its first row.
// Source: ggml's Q8_0.
//
// Build: KV, HEAD_DIM (a multiple of 16, or 32 with q8_0), CAPACITY (a multiple of 16; an expression in the kernel's `state`).
#if !defined(KV) || !defined(HEAD_DIM)
#error "kv_cache.cl needs the build constants KV, HEAD_DIM, CAPACITY"
#endif
#include "common/common.cl"
#include "common/kv_address.cl"

#define KV_QUANTIZED_q8_0 1
#define KV_QUANTIZED (CAT(KV_QUANTIZED_, KV) == 1)
#define KV_PAIRED_bf16x2 1
#define KV_PAIRED (CAT(KV_PAIRED_, KV) == 1)
#define kv_t CAT(KV, _t)

#if KV_QUANTIZED
#if HEAD_DIM % 32
#error "kv_cache.cl: with KV q8_0 HEAD_DIM is a multiple of 32"
#endif
#define KV_GROUPS (HEAD_DIM / 32)
#define KV_GROUP_SIZE 544  // 16 scales and 16 x 32 numbers of keys
#define KV_TILE (KV_GROUPS * KV_GROUP_SIZE)
#define KV_RUN 32         // dimensions appended together
#define KV_STAGED f32     // type of keys and values in local memory
#elif KV_PAIRED
#define KV_TILE (HEAD_DIM * 8)
#else
#define KV_TILE (HEAD_DIM * 16)
#define KV_RUN 1
#define KV_STAGED KV
#endif

#define KV_HEAD_SIZE ((size_t)(CAPACITY / 16) * KV_TILE)
#define KV_TILES_AT(cache, row) ((cache) + (size_t)((row) / 16) * KV_TILE)

#ifndef EACH_OF_RUN  // a GPU kernel unrolls the loop to keep a run in registers
#define EACH_OF_RUN(j) for (int j = 0; j < KV_RUN; ++j)
#endif

#if KV_QUANTIZED
inline float kv_scale(__global const uchar* scales, const int i) { return vload_half(i, (__global const half*)scales); }

// Returns dimensions d .. d+3 of key i; d is a multiple of 4.
inline float4 key4_at(__global const kv_t* tiles, const int i, const int d) {
    __global const kv_t* group = tiles + (i / 16 * KV_GROUPS + d / 32) * KV_GROUP_SIZE;
    const float4 q = convert_float4(vload4(0, group + 32 + d % 32 * 16 + i % 16 * 4));
    return (q - 128.0f) * kv_scale(group, i % 16);
}

inline float value_at(__global const kv_t* tiles, const int i, const int d) {
    __global const kv_t* tile = tiles + i / 16 * KV_TILE;
    const char q = as_char(tile[32 * KV_GROUPS + i % 16 * HEAD_DIM + d]);
    return (float)q * kv_scale(tile, d / 32 * 16 + i % 16);
}

// Returns d for a group. NaN and infinity pass into d, and so into every score, because the maximum is taken over bits, not floats.
inline float group_scale(const float* x) {
    uint top = 0;
    EACH_OF_RUN(j) top = max(top, as_uint(x[j]) & 0x7fffffffu);
    return as_float(top) / 127.0f;
}

inline int round_number(const float y) { return (int)(y + (y < 0.0f ? -0.5f : 0.5f)); }

inline void store_key(__global kv_t* tiles, const int i, const int d, const float* x) {
    __global kv_t* group = tiles + (i / 16 * KV_GROUPS + d / 32) * KV_GROUP_SIZE;
    const float scale = group_scale(x), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    store1_f16(scale, (__global f16_t*)group + i % 16);
    EACH_OF_RUN(j)
        group[32 + j / 4 * 64 + i % 16 * 4 + j % 4] = (uchar)(round_number(x[j] * inverse) + 128);
}

inline void store_value(__global kv_t* tiles, const int i, const int d, const float* x) {
    __global kv_t* tile = tiles + i / 16 * KV_TILE;
    const float scale = group_scale(x), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    store1_f16(scale, (__global f16_t*)tile + d / 32 * 16 + i % 16);
    EACH_OF_RUN(j)
        tile[32 * KV_GROUPS + i % 16 * HEAD_DIM + d + j] = as_uchar((char)round_number(x[j] * inverse));
}
#elif !KV_PAIRED
inline float4 key4_at(__global const kv_t* tiles, const int i, const int d) {
    __global const kv_t* k = tiles + (i / 16 * HEAD_DIM + d) * 16 + i % 16;
    return (float4)(CAT(load1_, KV)(k), CAT(load1_, KV)(k + 16), CAT(load1_, KV)(k + 32), CAT(load1_, KV)(k + 48));
}

inline float value_at(__global const kv_t* tiles, const int i, const int d) {
    return CAT(load1_, KV)(tiles + i * HEAD_DIM + d);
}

inline void store_key(__global kv_t* tiles, const int i, const int d, const float* x) {
    CAT(store1_, KV)(*x, tiles + (i / 16 * HEAD_DIM + d) * 16 + i % 16);
}

inline void store_value(__global kv_t* tiles, const int i, const int d, const float* x) {
    CAT(store1_, KV)(*x, tiles + i * HEAD_DIM + d);
}
#endif

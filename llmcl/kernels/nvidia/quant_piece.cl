// What a work-item takes of a quantised tile on an NVIDIA GPU: columns 8h .. 8h+7 and 8h+16 .. 8h+23 of a group, of four rows
// from 4 `quad` on, which are 16 bytes each of the vectors 2h and 2h + 1 (tiles.cl), 32 bytes of nibbles.
//
// Build: WEIGHT (quantised).
#include "tiles.cl"
#include "nvidia/ptx.cl"

typedef struct {
    uint4 quants[2];
#if WEIGHT_IS(q8_0)
    uint4 last[2];  // of columns from 16 on
#elif HAS_FIFTH_BIT || WEIGHT_IS(q6_k)
    uint4 high[WEIGHT_IS(q6_k) ? 2 : 1];  // fifth bits; bit pairs of the first and of the last 16 columns
#endif
    uint2 d;
#if HAS_MIN
    uint2 m;
#endif
#if IS_SUPER
    uint2 factors;  // sc and mn of q4_k and q5_k, the two sc of q6_k
#endif
} piece;

inline void load_piece(piece* p, __global const uchar* tile, const int g, const int h, const int quad) {
    __global const uchar* group = tile + GROUP_AT(g);
    __global const uchar* quants = group + SCALE_BYTES + h * 128 + quad * 16;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
        p->quants[v] = stream16(quants + 64 * v);
#if WEIGHT_IS(q8_0)
        p->last[v] = stream16(quants + 256 + 64 * v);
#elif WEIGHT_IS(q6_k)
        p->high[v] = stream16(group + SCALE_BYTES + 256 + 64 * v + quad * 16);
#endif
    }
#if HAS_FIFTH_BIT
    p->high[0] = stream16(group + SCALE_BYTES + 256 + quad * 16);
#endif
#if IS_SUPER
    __global const uchar* head = tile + g / 8 * SUPER_BYTES;
    p->factors = (uint2)(load4_words(group + quad * 4), load4_words(group + 16 + quad * 4));
#else
    __global const uchar* head = group;
#endif
    p->d = load8_words(head + quad * 8);
#if HAS_MIN
    p->m = load8_words(head + 32 + quad * 8);
#endif
}

inline uint word_of(const uint4 v, const int i) { return i < 2 ? (i == 0 ? v.x : v.y) : (i == 2 ? v.z : v.w); }

// Row i's bytes of the 16 columns, in the order of the activations: two words of the first 16 columns, two of the last.
inline void unpack(const piece* p, const int i, const int h, uint q[4]) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
        const uint u = word_of(p->quants[v], i);
#if WEIGHT_IS(q8_0)
        q[v] = u;
        q[2 + v] = word_of(p->last[v], i);
#else
        q[v] = u & 0x0f0f0f0fu;
        q[2 + v] = u >> 4 & 0x0f0f0f0fu;
#endif
#if HAS_FIFTH_BIT
        const uint high = word_of(p->high[0], i) >> (2 * h);
        q[v] |= (high >> v & 0x01010101u) << 4;
        q[2 + v] |= high >> v & 0x10101010u;
#elif WEIGHT_IS(q6_k)
        q[v] |= word_of(p->high[0], i) >> (4 * h) << (4 - 2 * v) & 0x30303030u;
        q[2 + v] |= word_of(p->high[1], i) >> (4 * h) << (4 - 2 * v) & 0x30303030u;
#endif
    }
}

inline void widen4(const uint2 u, float v[4]) {
    const float2 a = widen_f16(u.x), b = widen_f16(u.y);
    v[0] = a.x;
    v[1] = a.y;
    v[2] = b.x;
    v[3] = b.y;
}

typedef struct {
    float d[4], d_last[4], m[4];  // d_last: of the last 16 columns, with q6_k
} scales4;

inline scales4 scales_of(const piece* p) {
    scales4 s;
    widen4(p->d, s.d);
#if HAS_MIN
    widen4(p->m, s.m);
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if WEIGHT_IS(q6_k)
        const float d = s.d[i];
        s.d[i] = d * (float)(char)(p->factors.x >> (8 * i));
        s.d_last[i] = d * (float)(char)(p->factors.y >> (8 * i));
#elif IS_SUPER
        s.d[i] *= (float)(uchar)(p->factors.x >> (8 * i));
        s.m[i] *= -(float)(uchar)(p->factors.y >> (8 * i));
#endif
#if !WEIGHT_IS(q6_k)
        s.d_last[i] = s.d[i];
#endif
#if !HAS_MIN
        s.m[i] = 0.0f;
#endif
    }
    return s;
}

// Byte b of a word as a float, without the offset: added to the bits of 2^23, a byte is a part of that float's value.
#define BYTE_OF(u, b) (as_float(permute(u, 0x4b000000, 0x7440 + (b))) - (0x1p23f + OFFSET))

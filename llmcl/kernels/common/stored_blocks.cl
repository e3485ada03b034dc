// Blocks of quantised rows in a checkpoint's format (ggml-common.h): reads 16 numbers at a time, and their scale.
//
//   value = (number - STORED_OFFSET) d + m
//
//   Q8_0 {half d; 32 chars}   Q4_0 {half d; 16 bytes}   Q4_1 {half d, m; 16 bytes}        low nibbles first
//   Q5_0 {half d; uint of fifth bits; 16 bytes}         Q5_1 {half d, m; uint; 16 bytes}
//   MXFP4 {uchar; 16 bytes of codes}  (mxfp4.cl)
// and super-blocks of 256 values:
//   Q4_K {half d, dmin; 12 bytes of 6-bit scales and minima; 128 bytes}  Q5_K {as Q4_K, 32 bytes of fifth bits before the nibbles}
//   Q6_K {128 bytes of nibbles, 64 of bit pairs, 16 char scales, half d}
//
// Build: FORMAT, a name above or F32, F16, BF16 (no blocks). k is a multiple of 16.
#include "common/mxfp4.cl"

#define STORED_F32 0
#define STORED_F16 1
#define STORED_BF16 2
#define STORED_Q8_0 3
#define STORED_Q4_0 4
#define STORED_Q4_1 5
#define STORED_Q5_0 6
#define STORED_Q5_1 7
#define STORED_Q4_K 8
#define STORED_Q5_K 9
#define STORED_Q6_K 10
#define STORED_MXFP4 11
#define STORED_IS(name) (CAT(STORED_, FORMAT) == STORED_##name)
#define STORED_BLOCKS (CAT(STORED_, FORMAT) >= STORED_Q8_0)

#if STORED_BLOCKS
#define STORED_MIN (STORED_IS(Q4_1) || STORED_IS(Q5_1) || STORED_IS(Q4_K) || STORED_IS(Q5_K))
#define STORED_FIFTH_BIT (STORED_IS(Q5_0) || STORED_IS(Q5_1) || STORED_IS(Q5_K))
#define STORED_SUPER (STORED_IS(Q4_K) || STORED_IS(Q5_K) || STORED_IS(Q6_K))
#define STORED_OFFSET (STORED_IS(Q8_0) ? 128 : STORED_IS(Q6_K) ? 32 : STORED_IS(Q5_0) ? 16 : STORED_IS(Q4_0) ? 8 : STORED_IS(MXFP4) ? 12 : 0)

#if STORED_IS(Q6_K)
#define STORED_BYTES 210
#define STORED_D 208
#elif STORED_SUPER
#define STORED_NIBBLES (16 + (STORED_FIFTH_BIT ? 32 : 0))
#define STORED_BYTES (STORED_NIBBLES + 128)
#define STORED_D 0
#else
#define STORED_BITS (STORED_IS(MXFP4) ? 1 : STORED_MIN ? 4 : 2)
#define STORED_NIBBLES (STORED_BITS + (STORED_FIFTH_BIT ? 4 : 0))
#define STORED_BYTES (STORED_IS(Q8_0) ? 34 : STORED_NIBBLES + 16)
#define STORED_D 0
#endif

inline __global const uchar* stored_block(__global const uchar* row, int k) {
    return row + k / (STORED_SUPER ? 256 : 32) * STORED_BYTES;
}

// Reads the numbers in columns k .. k+15 of a row, none negative; for MXFP4 the codes.
inline void stored_numbers(__global const uchar* row, int k, uchar* q) {
    __global const uchar* block = stored_block(row, k);
#if STORED_IS(Q8_0)
    for (int i = 0; i < 16; ++i) q[i] = block[2 + k % 32 + i] ^ 0x80;
#elif STORED_IS(Q6_K)
    const int part = k % 128 / 32;
    __global const uchar* low = block + k % 256 / 128 * 64 + part % 2 * 32 + k % 32;
    __global const uchar* pairs = block + 128 + k % 256 / 128 * 32 + k % 32;
    for (int i = 0; i < 16; ++i) q[i] = (part < 2 ? low[i] & 15 : low[i] >> 4) | (pairs[i] >> (2 * part) & 3) << 4;
#elif STORED_SUPER
    const int part = k % 256 / 32;
    __global const uchar* nibbles = block + STORED_NIBBLES + part / 2 * 32 + k % 32;
    for (int i = 0; i < 16; ++i) {
        q[i] = part % 2 ? nibbles[i] >> 4 : nibbles[i] & 15;
        if (STORED_FIFTH_BIT) q[i] |= (block[16 + k % 32 + i] >> part & 1) << 4;
    }
#else
    __global const uchar* nibbles = block + STORED_NIBBLES;
    for (int i = 0; i < 16; ++i) q[i] = k % 32 ? nibbles[i] >> 4 : nibbles[i] & 15;
#if STORED_FIFTH_BIT
    __global const uchar* bits = block + STORED_BITS;
    const uint high = (bits[0] | bits[1] << 8 | bits[2] << 16 | (uint)bits[3] << 24) >> k % 32;
    for (int i = 0; i < 16; ++i) q[i] |= (high >> i & 1u) << 4;
#endif
#endif
}

#if STORED_SUPER
// Returns the scale and the minimum (0 in Q6_K) for columns k .. k+15, to be multiplied by d and dmin.
inline int2 stored_sub_scale(__global const uchar* row, int k) {
    __global const uchar* block = stored_block(row, k);
#if STORED_IS(Q6_K)
    return (int2)(((__global const char*)block)[192 + k % 256 / 16], 0);
#else
    __global const uchar* s = block + 4;
    const int j = k % 256 / 32;
    if (j < 4) return (int2)(s[j] & 63, s[j + 4] & 63);
    return (int2)((s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4);
#endif
}
#endif

// Converts a result of stored_numbers to the number.
#if STORED_IS(MXFP4)
#define STORED_NUMBER(q) ((int)(mxfp4_numbers(q) & 255u))
#else
#define STORED_NUMBER(q) (q)
#endif

// Returns (d, m) for columns k .. k+15.
inline float2 stored_scale(__global const uchar* row, int k) {
#if STORED_IS(MXFP4)
    return (float2)(mxfp4_scale(stored_block(row, k)[STORED_D]), 0.0f);
#else
    __global const half* d = (__global const half*)(stored_block(row, k) + STORED_D);
    float2 scale = (float2)(vload_half(0, d), STORED_MIN ? vload_half(1, d) : 0.0f);
#if STORED_SUPER
    const int2 sub = stored_sub_scale(row, k);
    scale *= (float2)(sub.x, -(float)sub.y);  // -0.0 instead of 0 lets a zero keep its sign
#endif
    return scale;
#endif
}
#endif

// Blocks of quantised rows in a checkpoint's format (ggml-common.h): reads 16 numbers at a time, and their scale.
//
//   value = (number - STORED_OFFSET) d + m
//
//   Q8_0 {half d; 32 chars}   Q4_0 {half d; 16 bytes}   Q4_1 {half d, m; 16 bytes}        low nibbles first
//   Q5_0 {half d; uint of fifth bits; 16 bytes}         Q5_1 {half d, m; uint; 16 bytes}
//   MXFP4 {uchar; 16 bytes of codes}  (mxfp4.cl)        NVFP4 {4 uchars; 32 bytes of codes}, 64 values, a scale for each 16
//   IQ4_NL {half d; 16 bytes of codes}  (number_table.cl)
// and super-blocks of 256 values:
//   Q4_K {half d, dmin; 12 bytes of 6-bit scales and minima; 128 bytes}  Q5_K {as Q4_K, 32 bytes of fifth bits before the nibbles}
//   Q6_K {128 bytes of nibbles, 64 of bit pairs, 16 char scales, half d}
//   Q2_K {16 bytes of scale and minimum; 64 of bit pairs; half d, dmin}  Q3_K {32 of third bits; 64 of bit pairs; 12 of scales; half d}
//   TQ1_0 {52 bytes of 5 or 4 ternary digits; half d}   TQ2_0 {64 bytes of bit pairs; half d}
//   IQ4_XS {half d; ushort and 4 bytes of 6-bit scales; 128 bytes of codes}
//   IQ3_*, IQ2_*, IQ1_*: see stored_grids.cl
//
// `grid`: the format's lookup grid (llmcl/checkpoint/grids.py), in formats that have one.
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
#define STORED_MXFP4 8
#define STORED_NVFP4 9
#define STORED_IQ4_NL 10
#define STORED_Q4_K 11  // from here on super-blocks
#define STORED_Q5_K 12
#define STORED_Q6_K 13
#define STORED_Q2_K 14
#define STORED_Q3_K 15
#define STORED_TQ1_0 16
#define STORED_TQ2_0 17
#define STORED_IQ4_XS 18
#define STORED_IQ3_S 19  // from here on with grids
#define STORED_IQ3_XXS 20
#define STORED_IQ2_XXS 21
#define STORED_IQ2_XS 22
#define STORED_IQ2_S 23
#define STORED_IQ1_S 24
#define STORED_IQ1_M 25
#define STORED_IS(name) (CAT(STORED_, FORMAT) == STORED_##name)
#define STORED_BLOCKS (CAT(STORED_, FORMAT) >= STORED_Q8_0)

#if STORED_BLOCKS
#define STORED_SUPER (CAT(STORED_, FORMAT) >= STORED_Q4_K)
#define STORED_GRID (CAT(STORED_, FORMAT) >= STORED_IQ3_S)
#define STORED_CODES (STORED_GRID || STORED_IS(IQ4_NL) || STORED_IS(IQ4_XS))
#define STORED_FP4 (STORED_IS(MXFP4) || STORED_IS(NVFP4))
#define STORED_MIN (STORED_IS(Q4_1) || STORED_IS(Q5_1) || STORED_IS(Q4_K) || STORED_IS(Q5_K) || STORED_IS(Q2_K))
#define STORED_FIFTH_BIT (STORED_IS(Q5_0) || STORED_IS(Q5_1) || STORED_IS(Q5_K))
#define STORED_OFFSET                                \
    (STORED_IS(Q8_0) || STORED_CODES           ? 128 \
     : STORED_IS(Q6_K)                         ? 32  \
     : STORED_IS(Q5_0)                         ? 16  \
     : STORED_FP4                              ? 12  \
     : STORED_IS(Q4_0)                         ? 8   \
     : STORED_IS(Q3_K)                         ? 4   \
     : STORED_IS(TQ1_0) || STORED_IS(TQ2_0)    ? 1   \
                                               : 0)
#define STORED_COLUMNS (STORED_SUPER ? 256 : STORED_IS(NVFP4) ? 64 : 32)

inline uint ushort_at(__global const uchar* at) { return at[0] | at[1] << 8; }

// The bytes of a block, and where d is.
#if STORED_GRID
#include "common/stored_grids.cl"
#elif STORED_IS(Q6_K)
#define STORED_BYTES 210
#define STORED_D 208
#elif STORED_IS(Q2_K)
#define STORED_BYTES 84
#define STORED_D 80
#define STORED_PAIRS 16
#elif STORED_IS(Q3_K)
#define STORED_BYTES 110
#define STORED_D 108
#define STORED_PAIRS 32
#elif STORED_IS(TQ1_0)
#define STORED_BYTES 54
#define STORED_D 52
#elif STORED_IS(TQ2_0)
#define STORED_BYTES 66
#define STORED_D 64
#define STORED_PAIRS 0
#elif STORED_IS(IQ4_XS)
#define STORED_BYTES 136
#define STORED_D 0
#elif STORED_IS(NVFP4)
#define STORED_BYTES 36
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
    return row + k / STORED_COLUMNS * STORED_BYTES;
}

// Reads the numbers in columns k .. k+15 of a row, none negative; where STORED_NUMBER converts, the codes.
inline void stored_numbers(__global const uchar* row, int k, __global const ushort* grid, uchar* q) {
    __global const uchar* block = stored_block(row, k);
    const int part = k % 128 / 32;  // of the 128 columns that share bytes of bit pairs
#if STORED_GRID
    grid_numbers(block, k % 256, grid, q);
#elif STORED_IS(Q8_0)
    for (int i = 0; i < 16; ++i) q[i] = block[2 + k % 32 + i] ^ 0x80;
#elif STORED_IS(Q6_K)
    __global const uchar* low = block + k % 256 / 128 * 64 + part % 2 * 32 + k % 32;
    __global const uchar* pairs = block + 128 + k % 256 / 128 * 32 + k % 32;
    for (int i = 0; i < 16; ++i) q[i] = (part < 2 ? low[i] & 15 : low[i] >> 4) | (pairs[i] >> (2 * part) & 3) << 4;
#elif STORED_IS(TQ1_0)
    for (int i = 0; i < 16; ++i) {
        const int v = k % 256 + i, run = v < 160 ? 32 : v < 240 ? 16 : 4, first = v < 160 ? 0 : v < 240 ? 160 : 240;
        uchar digits = block[first / 5 + (v - first) % run];
        for (int digit = (v - first) / run; digit > 0; --digit) digits *= 3;
        q[i] = digits * 3 >> 8;
    }
#elif defined(STORED_PAIRS)
    __global const uchar* pairs = block + STORED_PAIRS + k % 256 / 128 * 32 + k % 32;
    for (int i = 0; i < 16; ++i) {
        q[i] = pairs[i] >> (2 * part) & 3;
        if (STORED_IS(Q3_K)) q[i] |= (block[k % 32 + i] >> (k % 256 / 32) & 1) << 2;
    }
#elif STORED_IS(IQ4_XS)
    __global const uchar* codes = block + 8 + k % 256 / 32 * 16;
    for (int i = 0; i < 16; ++i) q[i] = k % 32 ? codes[i] >> 4 : codes[i] & 15;
#elif STORED_IS(NVFP4)
    __global const uchar* codes = block + 4 + k % 64 / 16 * 8;
    for (int i = 0; i < 16; ++i) q[i] = i < 8 ? codes[i] & 15 : codes[i - 8] >> 4;
#elif STORED_SUPER
    const int sub = k % 256 / 32;
    __global const uchar* nibbles = block + STORED_NIBBLES + sub / 2 * 32 + k % 32;
    for (int i = 0; i < 16; ++i) {
        q[i] = sub % 2 ? nibbles[i] >> 4 : nibbles[i] & 15;
        if (STORED_FIFTH_BIT) q[i] |= (block[16 + k % 32 + i] >> sub & 1) << 4;
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
// Returns the scale and the minimum for columns k .. k+15, to be multiplied by d and dmin. Without minima the second number is 0.
inline int2 stored_sub_scale(__global const uchar* row, int k) {
    __global const uchar* block = stored_block(row, k);
    const int sub = k % 256 / 16, j = sub / 2;
#if STORED_GRID
    return (int2)(grid_scale(block, sub), 0);
#elif STORED_IS(Q6_K)
    return (int2)(((__global const char*)block)[192 + sub], 0);
#elif STORED_IS(Q2_K)
    return (int2)(block[sub] & 15, block[sub] >> 4);
#elif STORED_IS(Q3_K)
    const int low = block[96 + sub % 8] >> (sub / 8 * 4) & 15, high = block[104 + sub % 4] >> (sub / 4 * 2) & 3;
    return (int2)((low | high << 4) - 32, 0);
#elif STORED_IS(TQ1_0) || STORED_IS(TQ2_0)
    return (int2)(1, 0);
#elif STORED_IS(IQ4_XS)
    const int low = block[4 + j / 2] >> (j % 2 * 4) & 15, high = ushort_at(block + 2) >> (2 * j) & 3;
    return (int2)((low | high << 4) - 32, 0);
#else
    __global const uchar* s = block + 4;
    if (j < 4) return (int2)(s[j] & 63, s[j + 4] & 63);
    return (int2)((s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4);
#endif
}
#endif

// Converts a result of stored_numbers to the number.
#if STORED_FP4
#define STORED_NUMBER(q) ((int)(mxfp4_numbers(q) & 255u))
#elif STORED_CODES
#ifndef NUMBER_TABLE
#define NUMBER_TABLE                                                     \
    (STORED_IS(IQ4_NL) || STORED_IS(IQ4_XS)   ? TABLE_IQ4                \
     : STORED_IS(IQ3_S)                       ? TABLE_IQ3_S              \
     : STORED_IS(IQ3_XXS)                     ? TABLE_IQ3_XXS            \
     : STORED_IS(IQ1_S) || STORED_IS(IQ1_M)   ? TABLE_IQ1                \
                                              : TABLE_IQ2)
#endif
#include "common/number_table.cl"
#define STORED_NUMBER(q) table_number(q)
#else
#define STORED_NUMBER(q) (q)
#endif

#if !STORED_FP4
// Returns the bits of a block's d.
inline ushort stored_d(__global const uchar* block) {
#if STORED_IS(IQ1_M)
    return scattered_d(block);
#else
    return ushort_at(block + STORED_D);
#endif
}
#endif

// Returns (d, m) for columns k .. k+15.
inline float2 stored_scale(__global const uchar* row, int k) {
    __global const uchar* block = stored_block(row, k);
#if STORED_IS(MXFP4)
    return (float2)(mxfp4_scale(block[0]), 0.0f);
#elif STORED_IS(NVFP4)
    return (float2)(nvfp4_scale(block[k % 64 / 16]), 0.0f);
#else
    const ushort d = stored_d(block);
    float2 scale = (float2)(vload_half(0, (const half*)&d), STORED_MIN ? vload_half(1, (__global const half*)(block + STORED_D)) : 0.0f);
#if STORED_GRID
    scale.x *= GRID_UNIT;
#endif
#if STORED_SUPER
    const int2 sub = stored_sub_scale(row, k);
    scale *= (float2)(sub.x, -(float)sub.y);  // -0.0 instead of 0 lets a zero keep its sign
#endif
    return scale;
#endif
}
#endif

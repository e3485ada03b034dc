// Multiplies a quantised weight tile by tokens with 8-bit activations, on a CPU: a token block, or with ROWS_APART rows at
// x[0], x[1], .., each a one-token block (cpu/packed_activations.cl).
//
// Four columns by 16 rows are unpacked once and multiplied by all tokens; integer and float32 sums stay in registers. A
// token's sums are added in the same order as in cpu/linear_decode.cl.
// Meanwhile the following tile in memory, mostly the next tile used, is prefetched.
// After cpu/quant_tile.cl and cpu/packed_activations.cl. Build: WEIGHT, K, DOT > 0, TILE_TOKENS.
#include "cpu/prefetch.cl"

// The numbers of token i in group g, and a field in its record.
#ifdef ROWS_APART
#define TOKENS __global const int* const*
#define NUMBERS_OF(i, g) (x[i] + (g) * ROW8)
#define RECORD_OF(i, g, which) x[i][(g) * ROW8 + 8 + (which)]
#else
#define TOKENS __global const int*
#define NUMBERS_OF(i, g) (x + (g) * BLOCK8 + 8 * (i))
#define RECORD_OF(i, g, which) x[(g) * BLOCK8 + RECORD_AT(i, which)]
#endif

// acc = a tile's products with `rows` (a constant) tokens.
IN_REGISTERS inline void multiply_tile(__global const uchar* tile, const TOKENS x, float16* acc, const int rows) {
    float16 sum[TILE_TOKENS];
#pragma unroll
    for (int i = 0; i < rows; ++i) sum[i] = 0;
#pragma nounroll
    for (int g = 0; g < K / 32; ++g) {
        __global const uchar* q = tile + GROUP_AT(g) + SCALE_BYTES;
        const scales16 s = load_scales(tile, g);
        PREFETCH_ALL(tile + TILE_SIZE + GROUP_AT(g), GROUP_BYTES);
        int16 a[TILE_TOKENS];
        short32 pairs[TILE_TOKENS];
#if HAS_HALF_SCALES
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int i = 0; i < rows; ++i) a[i] = (int16)(DOT_FROM_RECORD ? RECORD_OF(i, g, 1 + h) : 0);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint16 w = columns4(q, 4 * h + j);
#pragma unroll
                for (int i = 0; i < rows; ++i) add4(&a[i], &pairs[i], w, NUMBERS_OF(i, g)[4 * h + j], j, 4);
            }
#pragma unroll
            for (int i = 0; i < rows; ++i)
                sum[i] += CONVERT16(a[i], float) * ((h ? s.d_high : s.d) * as_float(RECORD_OF(i, g, 0)));
        }
#if HAS_HALF_MIN
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            sum[i] += s.m * (as_float(RECORD_OF(i, g, 0)) * (float)RECORD_OF(i, g, 1));
            sum[i] += s.m_high * (as_float(RECORD_OF(i, g, 0)) * (float)RECORD_OF(i, g, 2));
        }
#endif
#else
#pragma unroll
        for (int i = 0; i < rows; ++i) a[i] = (int16)(DOT_FROM_RECORD ? RECORD_OF(i, g, 1) : 0);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const uint16 w = columns4(q, (j & 1) * 4 + j / 2);  // both nibbles of a vector in turn
#pragma unroll
            for (int i = 0; i < rows; ++i) add4(&a[i], &pairs[i], w, NUMBERS_OF(i, g)[(j & 1) * 4 + j / 2], j, 8);
        }
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            sum[i] += CONVERT16(a[i], float) * (s.d * as_float(RECORD_OF(i, g, 0)));
#if HAS_MIN
            sum[i] += s.m * as_float(RECORD_OF(i, g, 2));
#endif
        }
#endif
    }
#pragma unroll
    for (int i = 0; i < rows; ++i) acc[i] = sum[i] * as_float(RECORD_OF(i, 0, 3));
}

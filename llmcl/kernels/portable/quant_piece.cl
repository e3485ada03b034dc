// A piece of a quantised weight tile (tiles.cl), read at once by a work-item: four rows in a group, VECTORS times the columns
// 4j .. 4j+3 and 16+4j .. 16+4j+3. Each j takes 16 bytes of nibbles, plus the rows' scales and higher bits.
//
//     piece p of group p / 8:    0     1     2      3      4     5     6      7        (two vectors; one: 16 pieces a group)
//     rows:                     0-3   4-7   8-11  12-15   0-3   4-7   8-11  12-15
//     j:                        0,2   0,2   0,2    0,2    1,3   1,3   1,3    1,3
//
// With more vectors, fewer instructions read and apply the scales, but a piece takes more registers.
//
// A number becomes a float without a conversion: or-ed into the bits of a power of two, it yields the power plus a multiple of the
// number.
// Nibbles in types without higher bits move to bits 15 and 19, two with one shift, where 256 and 16 have their units. They are multiplied
// with these powers still added; the sum starts below zero by the resulting excess, which is common to all rows. Numbers in other
// types, and
// numbers multiplied by several tokens (SHARED_NUMBERS), move to the low bits of 2^23, which is subtracted. Bits at place s are 2^s
// times the
// number; the matching column is divided by 2^s. The numbers are exact.
//
// portable/float_piece.cl is the floating-point equivalent. After portable/widen.cl. Build: WEIGHT, K, NORM, VECTORS (1, 2 or
// 4; default 1).
#ifndef VECTORS
#define VECTORS 1
#endif
#define PIECE_ROWS 4
#define TWINS 4  // pieces with the same columns
#define PIECES_OF_GROUP (16 / VECTORS)
#define N_PIECES (K / 32 * PIECES_OF_GROUP)  // per tile
#define FIRST_VECTOR(p) ((p) / TWINS % (4 / VECTORS))
#define VECTOR(p, v) (FIRST_VECTOR(p) + 4 / VECTORS * (v))  // number v in a piece
// Words of upper bits; with HAS_PAIRS the pairs of the first and the last 16 columns, then third bits.
#define HIGH_WORDS (HAS_PAIRS ? 2 + HAS_THIRD_BIT : WEIGHT_IS(q6_k) ? 2 : HAS_FIFTH_BIT)
#define HAS_HIGH (HAS_FIFTH_BIT || WEIGHT_IS(q6_k) || HAS_PAIRS)
#ifndef SHARED_NUMBERS
#define SHARED_NUMBERS 0
#endif
#define HAS_NIBBLES (WEIGHT_IS(q4_0) || WEIGHT_IS(q4_1) || WEIGHT_IS(q4_k))  // without higher bits
#define NIBBLES_ON_TOP (HAS_NIBBLES && !SHARED_NUMBERS)

typedef struct {
#if !HAS_PAIRS
    uint4 low[VECTORS];  // a word per row: nibbles, or the bytes for columns 4j .. 4j+3
#endif
#if WEIGHT_IS(q8_0)
    uint4 last[VECTORS];  // the bytes for columns 16+4j .. 16+4j+3
#elif HAS_HIGH
    uint4 high[HIGH_WORDS];
#endif
#if WEIGHT_IS(mxfp4)
    uint d;  // a byte a row
#elif !WEIGHT_IS(nvfp4)
    uint2 d;  // half, per row
#endif
#if IS_SUPER || WEIGHT_IS(nvfp4)
    uint factors[2];  // scales of the group's columns and minima, or of both halves; a byte per row
#endif
#if HAS_MIN || HAS_HALF_MIN
    uint2 m;
#endif
} piece;

inline uint4 words4_at(__global const uchar* p) { return *(__global const uint4*)p; }
inline uint2 words2_at(__global const uchar* p) { return *(__global const uint2*)p; }

inline piece load_piece(__global const uchar* tile, const int p) {
    const int g = p / PIECES_OF_GROUP, quad = p % TWINS;
    __global const uchar* group = tile + GROUP_AT(g);
    __global const uchar* quants = group + SCALE_BYTES + 16 * quad;
    piece found;
#if !HAS_PAIRS
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        found.low[v] = words4_at(quants + 64 * VECTOR(p, v));
#if WEIGHT_IS(q8_0)
        found.last[v] = words4_at(quants + 256 + 64 * VECTOR(p, v));
#endif
    }
#endif
#if HAS_HIGH
#pragma unroll
    for (int i = 0; i < HIGH_WORDS; ++i) found.high[i] = words4_at(quants + (HAS_PAIRS ? 0 : HIGH_AT) + 64 * i);
#endif
#if IS_SUPER || WEIGHT_IS(nvfp4)
    found.factors[0] = *(__global const uint*)(group + 4 * quad);
#if SCALE_BYTES > 16
    found.factors[1] = *(__global const uint*)(group + 16 + 4 * quad);
#endif
#endif
#if IS_SUPER
    __global const uchar* head = tile + g / 8 * SUPER_BYTES;
#else
    __global const uchar* head = group;
#endif
#if WEIGHT_IS(mxfp4)
    found.d = *(__global const uint*)(head + 4 * quad);
#elif !WEIGHT_IS(nvfp4)
    found.d = words2_at(head + 8 * quad);
#endif
#if HAS_MIN || HAS_HALF_MIN
    found.m = words2_at(head + 32 + 8 * quad);
#endif
    return found;
}

inline float4 halves_of(const uint2 words) { return (float4)(widen_f16(words.x), widen_f16(words.y)); }

// The scales of a piece's rows; with HAS_HALF_SCALES to be multiplied by half_scales, for the first 16 columns (h 0) or the last.
inline float4 piece_scales(const piece* p) {
#if WEIGHT_IS(mxfp4)
    const uchar4 scales = as_uchar4(p->d);
    return (float4)(mxfp4_scale(scales.x), mxfp4_scale(scales.y), mxfp4_scale(scales.z), mxfp4_scale(scales.w));
#elif WEIGHT_IS(nvfp4)
    return 1.0f;
#elif IS_SUPER && HAS_MIN
    return halves_of(p->d) * convert_float4(as_uchar4(p->factors[0]));
#elif IS_SUPER && HAS_HALF_SCALES
    return halves_of(p->d) * SCALE_UNIT;
#elif IS_SUPER
    return halves_of(p->d) * SCALE_UNIT * convert_float4(as_char4(p->factors[0]));
#else
    return halves_of(p->d);
#endif
}
#if HAS_HALF_SCALES
inline float4 half_scales(const piece* p, const int h) {
#if WEIGHT_IS(nvfp4)
    return nvfp4_scales(p->factors[h]);
#elif HAS_HALF_MIN
    return convert_float4(as_uchar4(p->factors[h] & 0x0f0f0f0fu));
#else
    return convert_float4(as_char4(p->factors[h]));
#endif
}
#endif

#if HAS_MIN || HAS_HALF_MIN
// Adds the minima times the sums of the piece's first and last columns.
inline void add_minima(float* sums, const piece* p, const float first, const float last) {
    float4 m = halves_of(p->m);
#if HAS_HALF_MIN
    m *= -(convert_float4(as_uchar4(p->factors[0] >> 4 & 0x0f0f0f0fu)) * first +
           convert_float4(as_uchar4(p->factors[1] >> 4 & 0x0f0f0f0fu)) * last);
#else
    m *= first + last;
#if IS_SUPER
    m *= -convert_float4(as_uchar4(p->factors[1]));
#endif
#endif
    sums[0] += m.x;
    sums[1] += m.y;
    sums[2] += m.z;
    sums[3] += m.w;
}
#endif

// A row's stored numbers (row named x, y, z or w), a byte each: vector j (number v in piece p), first four columns, and last four.
#define NIBBLES(word) ((word) & 0x0f0f0f0fu)
#if WEIGHT_IS(q8_0)
#define LOW_NUMBERS(row) p->low[v].row
#define HIGH_NUMBERS(row) p->last[v].row
#elif HAS_FP4
#define LOW_NUMBERS(row) mxfp4_numbers(p->low[v].row)
#define HIGH_NUMBERS(row) mxfp4_numbers(p->low[v].row >> 4)
#elif HAS_PAIRS
#if HAS_THIRD_BIT
#define THIRD_BITS(row, j) ((p->high[2].row >> (j) & 0x01010101u) << 2)
#else
#define THIRD_BITS(row, j) 0
#endif
#if !HAS_TABLE
#define table_numbers(word) (word)
#endif
#define LOW_NUMBERS(row) table_numbers((p->high[0].row >> (2 * j) & 0x03030303u) | THIRD_BITS(row, j))
#define HIGH_NUMBERS(row) table_numbers((p->high[1].row >> (2 * j) & 0x03030303u) | THIRD_BITS(row, j + 4))
#elif HAS_TABLE
#define LOW_NUMBERS(row) table_numbers(p->low[v].row)
#define HIGH_NUMBERS(row) table_numbers(p->low[v].row >> 4)
#else
#if WEIGHT_IS(q6_k)
#define LOW_UPPER(row) ((p->high[0].row >> (2 * j) & 0x03030303u) << 4)
#define HIGH_UPPER(row) ((p->high[1].row >> (2 * j) & 0x03030303u) << 4)
#elif HAS_FIFTH_BIT
#define LOW_UPPER(row) ((p->high[0].row >> j & 0x01010101u) << 4)
#define HIGH_UPPER(row) ((p->high[0].row >> (j + 4) & 0x01010101u) << 4)
#else
#define LOW_UPPER(row) 0
#define HIGH_UPPER(row) 0
#endif
#define LOW_NUMBERS(row) (NIBBLES(p->low[v].row) | LOW_UPPER(row))
#define HIGH_NUMBERS(row) (NIBBLES(p->low[v].row >> 4) | HIGH_UPPER(row))
#endif

#if DOT
#include "portable/int8_columns.cl"
#else
// The multipliers for a piece's rows: its columns, and the terms for offset and minimum.
typedef struct {
    float4 low[VECTORS], high[VECTORS];
#if NIBBLES_ON_TOP
    float start;  // initial value of a row's sum
#endif
#if HAS_MIN || HAS_HALF_MIN
    float sum_of_low, sum_of_high;
#endif
    uint power;
} columns;

#if NIBBLES_ON_TOP
// 256 in a variable, hidden from the compiler (`known` is >= 0, which the compiler can't know): a constant next to a mask would take
// a separate instruction. 16 has a smaller exponent, by four.
#define HIDDEN_POWER(known) (0x43800000u | (uint)(known) >> 31)
#define POWER_OF_HIGH(power) ((power)-0x02000000u)
#define SUM_OF(v) ((v).x + (v).y + ((v).z + (v).w))
#else
#define HIDDEN_POWER(known) (0x4b000000u | (uint)(known) >> 31)  // 2^23
#define PLACES (float4)(1.0f, 0x1p-8f, 1.0f, 0x1p-8f)
#define HIGH_PLACES (HAS_NIBBLES ? 0x1p-4f * PLACES : PLACES)
#endif

inline columns load_columns(__global const float* x, __global const float* norm, const int p, float* squares,
                            const uint power) {
    columns found;
    found.power = power;
    float4 lows, highs;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int k = p / PIECES_OF_GROUP * 32 + 4 * VECTOR(p, v);
        float4 low = *(__global const float4*)(x + k), high = *(__global const float4*)(x + k + 16);
#if NORM
        *squares += dot(low, low) + dot(high, high);
        low *= *(__global const float4*)(norm + k);
        high *= *(__global const float4*)(norm + k + 16);
#endif
        lows = v == 0 ? low : lows + low;
        highs = v == 0 ? high : highs + high;
#if NIBBLES_ON_TOP
        found.low[v] = low;
        found.high[v] = high;
#else
        found.low[v] = low * PLACES;
        found.high[v] = high * HIGH_PLACES;
#endif
    }
#if NIBBLES_ON_TOP
    found.start = -(256.0f + OFFSET) * SUM_OF(lows) - (16.0f + OFFSET) * SUM_OF(highs);
#endif
#if HAS_MIN || HAS_HALF_MIN
    found.sum_of_low = lows.x + lows.y + (lows.z + lows.w);
    found.sum_of_high = highs.x + highs.y + (highs.z + highs.w);
#endif
    return found;
}

inline columns scaled_columns(const columns x, const float factor) {
    columns scaled = x;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        scaled.low[v] *= factor;
        scaled.high[v] *= factor;
    }
#if NIBBLES_ON_TOP
    scaled.start *= factor;
#endif
#if HAS_MIN || HAS_HALF_MIN
    scaled.sum_of_low *= factor;
    scaled.sum_of_high *= factor;
#endif
    return scaled;
}

#if NIBBLES_ON_TOP
// `sum` plus the eight numbers in a word, with their powers of two, times their columns.
#define LOW_NIBBLE(word) as_float(((word) & 0x78000u) | power)
#define HIGH_NIBBLE(word) as_float(((word) & 0x780000u) | power_of_high)
inline float add_word(float sum, const uint w, const float4 low, const float4 high, const uint power) {
    const uint power_of_high = POWER_OF_HIGH(power);
    sum += LOW_NIBBLE(w << 15) * low.x;
    sum += HIGH_NIBBLE(w << 15) * high.x;
    sum += LOW_NIBBLE(w << 7) * low.y;
    sum += HIGH_NIBBLE(w << 7) * high.y;
    sum += LOW_NIBBLE(w >> 1) * low.z;
    sum += HIGH_NIBBLE(w >> 1) * high.z;
    sum += LOW_NIBBLE(w >> 9) * low.w;
    return sum + HIGH_NIBBLE(w >> 9) * high.w;
}
#define SUM_OF_ROW(sum, row) add_word(sum, p->low[v].row, c->low[v], c->high[v], c->power)
#define START c->start
#else
// The number in a word's bits `mask`, less OFFSET; times 2^place.
#define PLACED(word, mask, place) (as_float(((word) & (mask)) | power) - (8388608.0f + (float)(OFFSET << (place))))

// `sum` plus four numbers, less OFFSET, times their columns: from bit `place` on in each byte.
inline float add_numbers(float sum, const uint w, const uint mask, const int place, const float4 c, const uint power) {
    const uint v = w >> 16;
    sum += PLACED(w, mask, place) * c.x;
    sum += PLACED(w, mask << 8, place + 8) * c.y;
    sum += PLACED(v, mask, place) * c.z;
    return sum + PLACED(v, mask << 8, place + 8) * c.w;
}

// For a row named x, y, z or w: adds its first four columns to `sum`, or its last four.
#if HAS_NIBBLES
#define ADD_LOW(sum, row) add_numbers(sum, p->low[v].row, 0xfu, 0, c->low[v], c->power)
#define ADD_HIGH(sum, row) add_numbers(sum, p->low[v].row, 0xf0u, 4, c->high[v], c->power)
#else
#define ADD_LOW(sum, row) add_numbers(sum, LOW_NUMBERS(row), 0xffu, 0, c->low[v], c->power)
#define ADD_HIGH(sum, row) add_numbers(sum, HIGH_NUMBERS(row), 0xffu, 0, c->high[v], c->power)
#endif
#define SUM_OF_ROW(sum, row) ADD_HIGH(ADD_LOW(sum, row), row)
#define START 0.0f
#endif

// sums[i] += row i in piece number `number` times its columns.
inline void add_piece(float* sums, const piece* p, const columns* c, const int number) {
    const float4 d = piece_scales(p);
#if HAS_HALF_SCALES
    float4 low = 0.0f, high = 0.0f;
#else
    float4 y = START;
#endif
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int j = VECTOR(number, v);
#if HAS_HALF_SCALES
        low = (float4)(ADD_LOW(low.x, x), ADD_LOW(low.y, y), ADD_LOW(low.z, z), ADD_LOW(low.w, w));
        high = (float4)(ADD_HIGH(high.x, x), ADD_HIGH(high.y, y), ADD_HIGH(high.z, z), ADD_HIGH(high.w, w));
#else
        y = (float4)(SUM_OF_ROW(y.x, x), SUM_OF_ROW(y.y, y), SUM_OF_ROW(y.z, z), SUM_OF_ROW(y.w, w));
#endif
    }
#if HAS_HALF_SCALES
    const float4 y = low * half_scales(p, 0) + high * half_scales(p, 1);
#endif
#if HAS_MIN || HAS_HALF_MIN
    add_minima(sums, p, c->sum_of_low, c->sum_of_high);
#endif
    sums[0] += y.x * d.x;
    sums[1] += y.y * d.y;
    sums[2] += y.z * d.z;
    sums[3] += y.w * d.w;
}
#endif

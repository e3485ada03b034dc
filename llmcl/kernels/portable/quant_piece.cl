// A piece of a tile of quantised weights (tiles.cl), what a work-item reads at once: columns 4j .. 4j+3 and 16+4j .. 16+4j+3 of
// four rows of a group. That is 16 bytes of nibbles, with their scales and higher bits.
//
//     piece p of group p / 16:   0     1     2      3      4     5    ...    15
//     rows:                     0-3   4-7   8-11  12-15   0-3   4-7         12-15
//     j:                         0     0     0      0      1     1            3
//
// A number becomes a float without a conversion: or-ed into the low bits of 2^23 it is a float that is 2^23 larger. Four bits at
// place s are 2^s times the number; the column they meet is divided by that. All of it is exact.
//
// portable/float_piece.cl has the same for floating-point weights. After portable/widen.cl. Build: WEIGHT, K, NORM.
#define PIECE_ROWS 4
#define N_PIECES (K / 2)  // of a tile
#define TWINS 4           // pieces with the same columns
#define HAS_HIGH (HAS_FIFTH_BIT || WEIGHT_IS(q6_k))

typedef struct {
    uint4 low;  // a row a word: nibbles, or the bytes of columns 4j .. 4j+3
#if WEIGHT_IS(q8_0)
    uint4 last;  // the bytes of columns 16+4j .. 16+4j+3
#elif WEIGHT_IS(q6_k)
    uint4 high[2];  // bit pairs of the first 16 columns and of the last
#elif HAS_FIFTH_BIT
    uint4 high[1];
#endif
#if WEIGHT_IS(mxfp4)
    uint d;  // a byte a row
#else
    uint2 d;  // half, of each row
#endif
#if IS_SUPER
    uint factors[2];  // sc and mn of q4_k and q5_k, the two sc of q6_k: a byte a row
#endif
#if HAS_MIN
    uint2 m;
#endif
} piece;

inline uint4 words4_at(__global const uchar* p) { return *(__global const uint4*)p; }
inline uint2 words2_at(__global const uchar* p) { return *(__global const uint2*)p; }

inline piece load_piece(__global const uchar* tile, const int p) {
    const int g = p / 16, j = p / 4 % 4, quad = p % 4;
    __global const uchar* group = tile + GROUP_AT(g);
    __global const uchar* quants = group + SCALE_BYTES + 16 * quad;
    piece found;
    found.low = words4_at(quants + 64 * j);
#if WEIGHT_IS(q8_0)
    found.last = words4_at(quants + 256 + 64 * j);
#elif WEIGHT_IS(q6_k)
    found.high[0] = words4_at(quants + 256);
    found.high[1] = words4_at(quants + 320);
#elif HAS_FIFTH_BIT
    found.high[0] = words4_at(quants + 256);
#endif
#if IS_SUPER
    __global const uchar* head = tile + g / 8 * SUPER_BYTES;
    found.factors[0] = *(__global const uint*)(group + 4 * quad);
    found.factors[1] = *(__global const uint*)(group + 16 + 4 * quad);
#else
    __global const uchar* head = group;
#endif
#if WEIGHT_IS(mxfp4)
    found.d = *(__global const uint*)(head + 4 * quad);
#else
    found.d = words2_at(head + 8 * quad);
#endif
#if HAS_MIN
    found.m = words2_at(head + 32 + 8 * quad);
#endif
    return found;
}

inline float4 halves_of(const uint2 words) { return (float4)(widen_f16(words.x), widen_f16(words.y)); }

// The stored numbers of a row, named x, y, z or w, a byte each: of the first four columns, and of the last.
#define NIBBLES(word) ((word) & 0x0f0f0f0fu)
#if WEIGHT_IS(mxfp4)
#define LOW_NUMBERS(row) mxfp4_numbers(p->low.row)
#define HIGH_NUMBERS(row) mxfp4_numbers(p->low.row >> 4)
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
#define LOW_NUMBERS(row) (NIBBLES(p->low.row) | LOW_UPPER(row))
#define HIGH_NUMBERS(row) (NIBBLES(p->low.row >> 4) | HIGH_UPPER(row))
#endif

#if DOT
#include "portable/int8_columns.cl"
#else
// What rows of a piece are multiplied by: its columns, divided by the places of their numbers, and what offset and minimum need.
typedef struct {
    float4 low, high;
#if HAS_MIN
    float sum;
#endif
    uint big;
} columns;

#if WEIGHT_IS(q4_0) || WEIGHT_IS(q4_1) || WEIGHT_IS(q4_k)
#define LOW_PLACES (float4)(1.0f, 0x1p-8f, 1.0f, 0x1p-8f)
#define HIGH_PLACES (float4)(0x1p-4f, 0x1p-12f, 0x1p-4f, 0x1p-12f)
#else
#define LOW_PLACES (float4)(1.0f, 0x1p-8f, 1.0f, 0x1p-8f)
#define HIGH_PLACES LOW_PLACES
#endif

inline columns load_columns(__global const float* x, __global const float* norm, const int p, float* squares,
                            const uint big) {
    const int k = p / 16 * 32 + p / 4 % 4 * 4;
    float4 low = *(__global const float4*)(x + k), high = *(__global const float4*)(x + k + 16);
#if NORM
    *squares += dot(low, low) + dot(high, high);
    low *= *(__global const float4*)(norm + k);
    high *= *(__global const float4*)(norm + k + 16);
#endif
    columns found;
    found.big = big;
#if HAS_MIN
    const float4 both = low + high;
    found.sum = both.x + both.y + (both.z + both.w);
#endif
    found.low = low * LOW_PLACES;
    found.high = high * HIGH_PLACES;
    return found;
}

inline columns scaled_columns(const columns x, const float factor) {
    columns scaled = x;
    scaled.low *= factor;
    scaled.high *= factor;
#if HAS_MIN
    scaled.sum *= factor;
#endif
    return scaled;
}

// The number in the bits `mask` of a word, less OFFSET; times 2^place. `big` is 2^23 in a variable: a constant beside the mask
// would take an instruction of its own.
#define PLACED(word, mask, place) (as_float(((word) & (mask)) | big) - (8388608.0f + (float)(OFFSET << (place))))

// `sum` and four numbers, less OFFSET, times their columns: bytes of a word, or nibbles from bit 0 or from bit 4 on.
inline float add_bytes(float sum, const uint w, const float4 c, const uint big) {
    const uint v = w >> 16;
    sum += PLACED(w, 0xffu, 0) * c.x;
    sum += PLACED(w, 0xff00u, 8) * c.y;
    sum += PLACED(v, 0xffu, 0) * c.z;
    return sum + PLACED(v, 0xff00u, 8) * c.w;
}
inline float add_low_nibbles(float sum, const uint w, const float4 c, const uint big) {
    const uint v = w >> 16;
    sum += PLACED(w, 0xfu, 0) * c.x;
    sum += PLACED(w, 0xf00u, 8) * c.y;
    sum += PLACED(v, 0xfu, 0) * c.z;
    return sum + PLACED(v, 0xf00u, 8) * c.w;
}
inline float add_high_nibbles(float sum, const uint w, const float4 c, const uint big) {
    const uint v = w >> 16;
    sum += PLACED(w, 0xf0u, 4) * c.x;
    sum += PLACED(w, 0xf000u, 12) * c.y;
    sum += PLACED(v, 0xf0u, 4) * c.z;
    return sum + PLACED(v, 0xf000u, 12) * c.w;
}

// Of a row, named x, y, z or w: `sum` and its first four columns, and its last.
#if WEIGHT_IS(q8_0)
#define ADD_LOW(sum, row) add_bytes(sum, p->low.row, c->low, c->big)
#define ADD_HIGH(sum, row) add_bytes(sum, p->last.row, c->high, c->big)
#elif WEIGHT_IS(mxfp4) || HAS_HIGH
#define ADD_LOW(sum, row) add_bytes(sum, LOW_NUMBERS(row), c->low, c->big)
#define ADD_HIGH(sum, row) add_bytes(sum, HIGH_NUMBERS(row), c->high, c->big)
#else
#define ADD_LOW(sum, row) add_low_nibbles(sum, p->low.row, c->low, c->big)
#define ADD_HIGH(sum, row) add_high_nibbles(sum, p->low.row, c->high, c->big)
#endif
#define SUM_OF_ROW(row) ADD_HIGH(ADD_LOW(0.0f, row), row)

// sums[i] += row i of piece number `number`, times its columns.
inline void add_piece(float* sums, const piece* p, const columns* c, const int number) {
    const int j = number / 4 % 4;
#if WEIGHT_IS(mxfp4)
    const uchar4 scales = as_uchar4(p->d);
    const float4 d = (float4)(mxfp4_scale(scales.x), mxfp4_scale(scales.y), mxfp4_scale(scales.z), mxfp4_scale(scales.w));
#else
    float4 d = halves_of(p->d);
#endif
#if WEIGHT_IS(q6_k)
    const float4 low = (float4)(ADD_LOW(0.0f, x), ADD_LOW(0.0f, y), ADD_LOW(0.0f, z), ADD_LOW(0.0f, w));
    const float4 high = (float4)(ADD_HIGH(0.0f, x), ADD_HIGH(0.0f, y), ADD_HIGH(0.0f, z), ADD_HIGH(0.0f, w));
    const float4 y = low * convert_float4(as_char4(p->factors[0])) + high * convert_float4(as_char4(p->factors[1]));
#else
    const float4 y = (float4)(SUM_OF_ROW(x), SUM_OF_ROW(y), SUM_OF_ROW(z), SUM_OF_ROW(w));
#endif
#if HAS_MIN
    float4 m = halves_of(p->m) * c->sum;
#if IS_SUPER
    d *= convert_float4(as_uchar4(p->factors[0]));
    m *= -convert_float4(as_uchar4(p->factors[1]));
#endif
    sums[0] += m.x;
    sums[1] += m.y;
    sums[2] += m.z;
    sums[3] += m.w;
#endif
    sums[0] += y.x * d.x;
    sums[1] += y.y * d.y;
    sums[2] += y.z * d.z;
    sums[3] += y.w * d.w;
}
#endif

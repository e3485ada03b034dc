// Rounds a token's columns to 8 bits, in groups of 32 with a scale, and multiplies quantised weight pieces (quant_piece.cl) by them.
//
//   x[k] is about numbers[k] scale[k / 32],   scale = max |x| / 127 in the group
//
//   numbers  int [K / 4], four columns a word     scales  float [K / 32]; NaN if an x in the group is no number
//
// A row in global memory holds both: ROW_WORDS words. Products with a piece are exact integer sums, four at a time if the device has
// the instruction (dot4.cl).
// After common/tiles.cl. Build: WEIGHT, K, DOT.
#include "portable/dot4.cl"

#define ROW_WORDS (K / 4 + K / 32)

inline float4 larger(const float4 top, const float4 v) { return fmax(top, fabs(v)); }

// Packs four numbers with |v| <= 127: adding 1.5 x 2^23 rounds to the nearest integer, which ends up in the lower bits.
inline int packed4(const float4 v) { return as_int(convert_char4(as_int4(v + 0x1.8p23f) - 0x4b400000)); }

// Rounds 32 columns in eight groups of four; returns the scale.
IN_REGISTERS inline float round_columns(const float4* v, int* numbers) {
    float4 tops = 0.0f, all = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        tops = larger(tops, v[j]);
        all += v[j];
    }
    const float top = fmax(fmax(tops.x, tops.y), fmax(tops.z, tops.w));
    const float inverse = top > 0.0f ? 127.0f / top : 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) numbers[j] = packed4(v[j] * inverse);
    const float sum = all.x + all.y + (all.z + all.w);
    return isnan(sum) ? NAN : top / 127.0f;  // infinite numbers become 0, and 0 times the scale is NaN, too
}

// The columns for a piece, per vector: 4j .. 4j+3 and 16+4j .. 16+4j+3 in a group.
typedef struct {
    int low[VECTORS], high[VECTORS];
    float scale;
} columns;

#define HIDDEN_POWER(known) 0u  // numbers do not become floats
// Reads the columns for piece p from a row's numbers, in local or global memory.
#define COLUMN_WORD(p, v) ((p) / PIECES_OF_GROUP * 8 + VECTOR(p, v))
#define TAKE_COLUMNS(found, numbers, p)                        \
    for (int v = 0; v < VECTORS; ++v) {                        \
        (found).low[v] = (numbers)[COLUMN_WORD(p, v)];         \
        (found).high[v] = (numbers)[COLUMN_WORD(p, v) + 4];    \
    }

#define ONES 0x01010101

// A row's signed bytes (row named x, y, z or w): first four columns in vector j (number v of piece p), and last four.
#if OFFSET == 128
#define LOW_BYTES(row) (LOW_NUMBERS(row) ^ 0x80808080u)
#define HIGH_BYTES(row) (HIGH_NUMBERS(row) ^ 0x80808080u)
#define BYTE_OFFSET 0
#else
#define LOW_BYTES(row) LOW_NUMBERS(row)
#define HIGH_BYTES(row) HIGH_NUMBERS(row)
#define BYTE_OFFSET OFFSET
#endif

// sums[i] += row i in piece number `number` times its columns.
inline void add_piece(float* sums, const piece* p, const columns* c, const int number) {
    int sum_of_low = 0, sum_of_high = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        sum_of_low = dot4(c->low[v], ONES, sum_of_low);
        sum_of_high = dot4(c->high[v], ONES, sum_of_high);
    }
#if HAS_HALF_SCALES
    int4 low = -BYTE_OFFSET * sum_of_low, high = -BYTE_OFFSET * sum_of_high;
#else
    int4 all = -BYTE_OFFSET * (sum_of_low + sum_of_high);
#endif
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int j = VECTOR(number, v);
#define ADD_LOW(sums, row) dot4(LOW_BYTES(row), c->low[v], sums.row)
#define ADD_HIGH(sums, row) dot4(HIGH_BYTES(row), c->high[v], sums.row)
#if HAS_HALF_SCALES
        low = (int4)(ADD_LOW(low, x), ADD_LOW(low, y), ADD_LOW(low, z), ADD_LOW(low, w));
        high = (int4)(ADD_HIGH(high, x), ADD_HIGH(high, y), ADD_HIGH(high, z), ADD_HIGH(high, w));
#else
        all = (int4)(ADD_LOW(all, x), ADD_LOW(all, y), ADD_LOW(all, z), ADD_LOW(all, w));
        all = (int4)(ADD_HIGH(all, x), ADD_HIGH(all, y), ADD_HIGH(all, z), ADD_HIGH(all, w));
#endif
    }
#if HAS_HALF_SCALES
    const float4 y = convert_float4(low) * half_scales(p, 0) + convert_float4(high) * half_scales(p, 1);
#else
    const float4 y = convert_float4(all);
#endif
#if HAS_MIN || HAS_HALF_MIN
    add_minima(sums, p, c->scale * (float)sum_of_low, c->scale * (float)sum_of_high);
#endif
    const float4 d = piece_scales(p) * c->scale;
    sums[0] += y.x * d.x;
    sums[1] += y.y * d.y;
    sums[2] += y.z * d.z;
    sums[3] += y.w * d.w;
}

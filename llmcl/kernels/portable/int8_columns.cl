// A token's columns rounded to 8 bits, in groups of 32 with a scale, and a piece of quantised weights (quant_piece.cl) times them.
//
//   x[k] = numbers[k] scale[k / 32] about,   scale = max |x| / 127 of the group
//
//   numbers  int [K / 4], four columns a word     scales  float [K / 32]; NaN where an x of the group is no number
//
// A row in global memory has both: ROW_WORDS words. The products of a piece are sums of integers, exact: an instruction for four of them, where the device has it (dot4.cl).
// After common/tiles.cl. Build: WEIGHT, K, DOT.
#include "portable/dot4.cl"

#define ROW_WORDS (K / 4 + K / 32)

inline float4 larger(const float4 top, const float4 v) { return fmax(top, fabs(v)); }

// Four numbers, from |v| up to 127: adding 1.5 x 2^23 rounds to the nearest integer, which is then the lower bits.
inline int packed4(const float4 v) { return as_int(convert_char4(as_int4(v + 0x1.8p23f) - 0x4b400000)); }

// Rounds 32 columns, eight times four; returns their scale.
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
    return isnan(sum) ? NAN : top / 127.0f;  // infinite numbers are 0, and 0 times their scale is NaN, too
}

// The eight columns that a piece meets: 4j .. 4j+3 and 16+4j .. 16+4j+3 of a group.
typedef struct {
    int low, high;
    float scale;
} columns;

#define ONES 0x01010101
#define SUM_OF_COLUMNS(c) dot4((c)->low, ONES, dot4((c)->high, ONES, 0))

// Signed bytes of a row, named x, y, z or w: of the first four columns, and of the last.
#if WEIGHT_IS(q8_0)
#define LOW_BYTES(row) (p->low.row ^ 0x80808080u)
#define HIGH_BYTES(row) (p->last.row ^ 0x80808080u)
#define BYTE_OFFSET 0
#else
#define LOW_BYTES(row) LOW_NUMBERS(row)
#define HIGH_BYTES(row) HIGH_NUMBERS(row)
#define BYTE_OFFSET OFFSET
#endif

// sums[i] += row i of piece number `number`, times its columns.
inline void add_piece(float* sums, const piece* p, const columns* c, const int number) {
    const int j = number / 4 % 4;
#if WEIGHT_IS(mxfp4)
    const uchar4 scales = as_uchar4(p->d);
    float4 d = (float4)(mxfp4_scale(scales.x), mxfp4_scale(scales.y), mxfp4_scale(scales.z), mxfp4_scale(scales.w));
#else
    float4 d = halves_of(p->d);
#endif
#if WEIGHT_IS(q6_k)
    const int below_low = -BYTE_OFFSET * dot4(c->low, ONES, 0), below_high = -BYTE_OFFSET * dot4(c->high, ONES, 0);
#define LOW_SUM(row) dot4(LOW_BYTES(row), c->low, below_low)
#define HIGH_SUM(row) dot4(HIGH_BYTES(row), c->high, below_high)
    const float4 y = (float4)(LOW_SUM(x), LOW_SUM(y), LOW_SUM(z), LOW_SUM(w)) * convert_float4(as_char4(p->factors[0])) +
                     (float4)(HIGH_SUM(x), HIGH_SUM(y), HIGH_SUM(z), HIGH_SUM(w)) * convert_float4(as_char4(p->factors[1]));
#else
    const int below = BYTE_OFFSET ? -BYTE_OFFSET * SUM_OF_COLUMNS(c) : 0;
#define ROW_SUM(row) dot4(LOW_BYTES(row), c->low, dot4(HIGH_BYTES(row), c->high, below))
    const float4 y = (float4)(ROW_SUM(x), ROW_SUM(y), ROW_SUM(z), ROW_SUM(w));
#endif
#if HAS_MIN
    float4 m = halves_of(p->m) * (c->scale * (float)SUM_OF_COLUMNS(c));
#if IS_SUPER
    d *= convert_float4(as_uchar4(p->factors[0]));
    m *= -convert_float4(as_uchar4(p->factors[1]));
#endif
    sums[0] += m.x;
    sums[1] += m.y;
    sums[2] += m.z;
    sums[3] += m.w;
#endif
    d *= c->scale;
    sums[0] += y.x * d.x;
    sums[1] += y.y * d.y;
    sums[2] += y.z * d.z;
    sums[3] += y.w * d.w;
}

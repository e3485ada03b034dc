// Unpacks 16 rows of a quantised tile (tiles.cl) as vectors, and multiplies them by a token's activations.
//
//   y[r] = sum_g d[r] sum_k (q[r][k] - OFFSET) x[k]  +  m[r] sum_k x[k]      k over the 32 columns of group g
//
// DOT selects the multiplication of four columns at once:
//   0  in float32, with exact activations;  1, 2, 3  with the processor's 8-bit dot product (cpu/dot4.cl)
// With DOT > 0 the activations are rounded to 8 bits, group by group, like llama.cpp's q8_0:
//   s = max |x| / 127,  x ~ s xq;   record (s, -OFFSET sum xq, 0 (ints), s sum xq), with HAS_HALF_SCALES
//   (s, -OFFSET sum over the first 16 xq, over the last 16, ...), with HAS_HALF_MIN (s, sum over the first 16 xq, ...)
//
// Build: WEIGHT (quantised), K, DOT. Accumulation: int32 within a group (exact), float32 across groups.
#if !defined(DOT)
#error "cpu/quant_tile.cl needs the build constant DOT"
#endif
#include "common/tiles.cl"
#if QUANTIZED

// Tiles are a multiple of 32 bytes, not of 64; with a byte a scale of 16.
#define QUANT_BYTES (SCALE_BYTES % 32 ? 16 : 32)
typedef uint uint16_in_tile __attribute__((ext_vector_type(16), aligned(QUANT_BYTES)));
#if HAS_TABLE
// table_numbers for 16 words. Compilers make a byte shuffle (pshufb) of `shuffle`.
inline uint4 look_up(const uint4 codes) {
    const uint4 table = (uint4)((uint)TABLE_LOW, (uint)(TABLE_LOW >> 32), (uint)TABLE_HIGH, (uint)(TABLE_HIGH >> 32));
    return as_uint4(shuffle(as_uchar16(table), as_uchar16(codes)));
}
inline uint16 table_numbers16(const uint16 codes) {
    return (uint16)(look_up(codes.lo.lo), look_up(codes.lo.hi), look_up(codes.hi.lo), look_up(codes.hi.hi));
}
#endif
inline uint16 load_quants(__global const uchar* p) { return *(__global const uint16_in_tile*)p; }

// Columns 4j .. 4j+3 in a group with quants from q on: 16 rows x 4 bytes.
inline uint16 columns4(__global const uchar* q, const int j) {
#if WEIGHT_IS(q8_0)
    return load_quants(q + 64 * j);
#elif HAS_PAIRS
    uint16 v = load_quants(q + 64 * (j / 4)) >> (2 * (j & 3)) & 0x03030303u;
#if HAS_THIRD_BIT
    v |= (load_quants(q + HIGH_AT) >> j & 0x01010101u) << 2;
#endif
#if HAS_TABLE
    v = table_numbers16(v);
#endif
    return v;
#else
    const uint16 nibbles = load_quants(q + 64 * (j & 3));
    uint16 v = (j < 4 ? nibbles : nibbles >> 4) & 0x0f0f0f0fu;
#if HAS_FIFTH_BIT
    v |= (load_quants(q + 256) >> j & 0x01010101u) << 4;
#elif WEIGHT_IS(q6_k)
    v |= (load_quants(q + 256 + 64 * (j / 4)) >> (2 * (j & 3)) & 0x03030303u) << 4;
#elif HAS_FP4
    v = mxfp4_numbers16(v);
#elif HAS_TABLE
    v = table_numbers16(v);
#endif
    return v;
#endif
}

#if WEIGHT_IS(nvfp4)
// nvfp4_scale for each.
inline float16 nvfp4_scales16(const uchar16 scales) {
    const int16 bits = CONVERT16(scales & (uchar16)127, int);
    const float16 d = as_float16((bits << 20) + (119 << 23));
    const float16 all = bits < 8 ? (d - 0x1p-8f) * 2.0f : d;
    return CONVERT16(scales, int) == 127 ? (float16)(0.0f) : all;
}
#endif

typedef struct {
    float16 d, d_high, m;  // d_high: for the last 16 columns, with HAS_HALF_SCALES
#if HAS_HALF_MIN
    float16 m_high;
#endif
} scales16;

inline scales16 load_scales(__global const uchar* tile, const int g) {
    __global const uchar* group = tile + GROUP_AT(g);
    scales16 s;
#if IS_SUPER
    __global const uchar* head = tile + g / 8 * SUPER_BYTES;
    const float16 d = load16_f16((__global const f16_t*)head);
#if HAS_MIN
    s.d = d * CONVERT16(*(__global const uchar16*)group, float);
    s.m = -(load16_f16((__global const f16_t*)(head + 32)) * CONVERT16(*(__global const uchar16*)(group + 16), float));
    s.d_high = s.d;
#elif HAS_HALF_MIN
    const float16 d_min = load16_f16((__global const f16_t*)(head + 32));
    const uchar16 low = *(__global const uchar16*)group, high = *(__global const uchar16*)(group + 16);
    s.d = d * CONVERT16(low & (uchar16)15, float);
    s.d_high = d * CONVERT16(high & (uchar16)15, float);
    s.m = -(d_min * CONVERT16(low >> (uchar16)4, float));
    s.m_high = -(d_min * CONVERT16(high >> (uchar16)4, float));
#else
    const float16 unit = d * SCALE_UNIT;
    s.d = unit * CONVERT16(*(__global const char16*)group, float);
    s.d_high = HAS_HALF_SCALES ? unit * CONVERT16(*(__global const char16*)(group + 16), float) : s.d;
    s.m = 0;
#endif
#elif WEIGHT_IS(nvfp4)
    s.d = nvfp4_scales16(*(__global const uchar16*)group);
    s.d_high = nvfp4_scales16(*(__global const uchar16*)(group + 16));
    s.m = 0;
#elif WEIGHT_IS(mxfp4)
    const int16 scale = CONVERT16(*(__global const uchar16*)group, int);
    s.d = as_float16((scale > 1 ? scale - 1 : (int16)(0)) << 23);  // mxfp4_scale for each
    s.d_high = s.d;
    s.m = 0;
#else
    s.d = load16_f16((__global const f16_t*)group);
    s.d_high = s.d;
#if HAS_MIN
    s.m = load16_f16((__global const f16_t*)(group + 32));
#else
    s.m = 0;
#endif
#endif
    return s;
}

#if DOT
#define DOT_LARGEST (OFFSET == 128 ? 255 : WEIGHT_IS(q6_k) ? 63 : HAS_FIFTH_BIT ? 31 : HAS_FP4 ? 24 : 15)
#include "cpu/dot4.cl"
#define DOT_FROM_RECORD (OFFSET && !DOT_IS_SIGNED)  // sums begin with the record's -OFFSET sum xq
#include "cpu/quantize_group.cl"

inline float4 quantize_group(const float16 lo, const float16 hi, char16* q) {
    return quantize_group_for(lo, hi, q, RECORD_OFFSET_OF(WEIGHT_IS), HAS_HALF_SCALES);
}

// A token's activations, rounded.
typedef struct {
    char16 q[K / 16];
    float4 group[K / 32];
} activations;

inline void set_group(activations* x, const int g, const float16 lo, const float16 hi) {
    x->group[g] = quantize_group(lo, hi, x->q + 2 * g);
}

inline float16 dot_quant_tile(__global const uchar* tile, const activations* x) {
    float16 sum = 0;
    const int* xq = (const int*)x->q;
    for (int g = 0; g < K / 32; ++g, xq += 8) {
        __global const uchar* q = tile + GROUP_AT(g) + SCALE_BYTES;
        const float4 record = x->group[g];
        int16 a = (int16)(DOT_FROM_RECORD ? as_int(record.y) : 0), b = (int16)(DOT_FROM_RECORD ? as_int(record.z) : 0);
        short32 in_a, in_b;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            add4(&a, &in_a, columns4(q, j), xq[j], j, 4);
            add4(&b, &in_b, columns4(q, j + 4), xq[j + 4], j, 4);
        }
        const scales16 s = load_scales(tile, g);
#if HAS_HALF_SCALES
        sum += CONVERT16(a, float) * (s.d * record.x);
        sum += CONVERT16(b, float) * (s.d_high * record.x);
#else
        sum += CONVERT16(a + b, float) * (s.d * record.x);
#endif
#if HAS_MIN
        sum += s.m * record.w;
#elif HAS_HALF_MIN
        sum += s.m * (record.x * (float)as_int(record.y));
        sum += s.m_high * (record.x * (float)as_int(record.z));
#endif
    }
    return sum;
}
#else

// A token's activations in float32, and each group's sum.
typedef struct {
    float16 x[K / 16];
    float sum[K / 32];
} activations;

inline void set_group(activations* x, const int g, const float16 lo, const float16 hi) {
    x->x[2 * g] = lo;
    x->x[2 * g + 1] = hi;
    x->sum[g] = sum16(lo + hi);
}

// Adds a group's products to sum: a from its first 16 columns, b from the last; total: the sum of its activations.
inline float16 add_group(float16 sum, const float16 a, const float16 b, const scales16 s, const float total) {
#if HAS_HALF_MIN
    sum += a + b;  // widened with scales and minima
#elif HAS_HALF_SCALES
    sum += a * s.d + b * s.d_high;
#else
    sum += (a + b) * s.d;
#endif
#if HAS_MIN
    sum += s.m * total;
#endif
    return sum;
}

// Byte b in each lane, without the offset.
#define BYTE16(v, b) CONVERT16(as_int16((v) >> (8 * (b)) & 0xffu) - OFFSET, float)
// The same in column 4j + b; with HAS_HALF_MIN the value itself, whose product q d is exact.
#if HAS_HALF_MIN
#define NUMBER16(v, j, b) (BYTE16(v, b) * ((j) < 4 ? s.d : s.d_high) + ((j) < 4 ? s.m : s.m_high))
#else
#define NUMBER16(v, j, b) BYTE16(v, b)
#endif

inline float16 dot_quant_tile(__global const uchar* tile, const activations* x) {
    float16 sum = 0;
    for (int g = 0; g < K / 32; ++g) {
        __global const uchar* q = tile + GROUP_AT(g) + SCALE_BYTES;
        const float* v = (const float*)x->x + 32 * g;
#if HAS_HALF_MIN
        const scales16 s = load_scales(tile, g);
#endif
        float16 a = 0, b = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint16 first = columns4(q, j), last = columns4(q, j + 4);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a += NUMBER16(first, j, i) * v[4 * j + i];
                b += NUMBER16(last, j + 4, i) * v[4 * j + 16 + i];
            }
        }
        sum = add_group(sum, a, b, load_scales(tile, g), x->sum[g]);
    }
    return sum;
}

// Widens a group's 32 columns to float32, without scales except for HAS_HALF_MIN, for products with many tokens.
inline void widen_group(__global const uchar* tile, const int g, float16* w) {
    __global const uchar* q = tile + GROUP_AT(g) + SCALE_BYTES;
#if HAS_HALF_MIN
    const scales16 s = load_scales(tile, g);
#endif
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const uint16 columns = columns4(q, j);
#pragma unroll
        for (int i = 0; i < 4; ++i) w[4 * j + i] = NUMBER16(columns, j, i);
    }
}
#endif
#endif

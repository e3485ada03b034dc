// A work-item's share when linear_prefill.cl loads a weight block into local memory.
//
// A block is BLOCK_TILES tiles by 16 columns, from column k on (a multiple of 16). A share is eight values:
//
//   16 bits      16 tile bytes: 8 rows in a column               32 bits  4 rows in a column, and in the next column
//   quantised    columns 4j .. 4j+3 in two rows, j = 0 .. 3 (tiles.cl)
//
// load_share requests a share, store_share widens it and stores it as rows[column][PLACE(row)]; in between the product is computed.
// PLACE puts even tiles into a column's first half and odd tiles into the second: gate and up rows lie HALF_ROWS apart.
// After portable/widen.cl. Build: WEIGHT, K; BLOCK_TILES (4 or 8).
#define SHARES (BLOCK_TILES * 32)
#define ROW_STRIDE (BLOCK_TILES * 16 + (WEIGHT_IS(f32) ? 0 : 4))  // spreads columns stored by neighbours over the banks
#define HALF_ROWS (BLOCK_TILES * 8)
#define PLACE(tile) ((tile) % 2 * HALF_ROWS + (tile) / 2 * 16)

#if !QUANTIZED
typedef struct {
    uint4 words[sizeof(CAT(WEIGHT, _t)) / 2];
} share;

inline share load_share(__global const CAT(WEIGHT, _t)* tile, const int k, const int i) {
    share s;
    __global const uint4* pieces = (__global const uint4*)(tile + (size_t)k * 16);
#pragma unroll
    for (int h = 0; h < (int)sizeof(CAT(WEIGHT, _t)) / 2; ++h) s.words[h] = pieces[i % 32 + 32 * h];
    return s;
}

inline void store_share(const share* s, __local float* rows, const int k, const int i) {
    const int piece = i % 32;
    __local float* to = rows + PLACE(i / 32);
#if WEIGHT_IS(f32)
    to += piece / 4 * ROW_STRIDE + piece % 4 * 4;
    *(__local float4*)to = as_float4(s->words[0]);
    *(__local float4*)(to + 8 * ROW_STRIDE) = as_float4(s->words[1]);
#else
    to += piece / 2 * ROW_STRIDE + piece % 2 * 8;
    *(__local float4*)to = (float4)(CAT(widen_, WEIGHT)(s->words[0].x), CAT(widen_, WEIGHT)(s->words[0].y));
    *(__local float4*)(to + 4) = (float4)(CAT(widen_, WEIGHT)(s->words[0].z), CAT(widen_, WEIGHT)(s->words[0].w));
#endif
}
#else
#define HAS_HIGH (HAS_FIFTH_BIT || HAS_THIRD_BIT || WEIGHT_IS(q6_k))
typedef struct {
    uint2 numbers;  // the two rows' nibbles, bytes or bit pairs
#if HAS_HIGH
    uint2 upper;
#endif
    uint d;  // two halves; with mxfp4 and nvfp4 two bytes
#if HAS_MIN || HAS_HALF_MIN
    uint m;
#endif
#if IS_SUPER
    ushort factors, minima;  // two bytes
#endif
} share;

// i: row pair i % 8, and j = i / 8 % 4.
inline share load_share(__global const uchar* tile, const int k, const int i) {
    const int g = k / 32, part = k / 16 % 2, j = i / 8 % 4, pair = i % 8;
    __global const uchar* group = tile + GROUP_AT(g);
    __global const uchar* quants = group + SCALE_BYTES + 8 * pair;
    share s;
    s.numbers = *(__global const uint2*)(quants + 64 * (WEIGHT_IS(q8_0) ? 4 * part + j : HAS_PAIRS ? part : j));
#if HAS_HIGH
    s.upper = *(__global const uint2*)(quants + HIGH_AT + (WEIGHT_IS(q6_k) ? 64 * part : 0));
#endif
#if IS_SUPER
    __global const uchar* head = tile + g / 8 * SUPER_BYTES;
    s.factors = *(__global const ushort*)(group + 2 * pair + (HAS_HALF_SCALES ? 16 * part : 0));
#if HAS_MIN
    s.minima = *(__global const ushort*)(group + 16 + 2 * pair);
#else
    s.minima = s.factors >> 4 & 0x0f0f;  // with HAS_HALF_MIN
#endif
#else
    __global const uchar* head = group;
#endif
#if HAS_FP4
    s.d = *(__global const ushort*)(head + 2 * pair + (HAS_HALF_SCALES ? 16 * part : 0));
#else
    s.d = *(__global const uint*)(head + 4 * pair);
#endif
#if HAS_MIN || HAS_HALF_MIN
    s.m = *(__global const uint*)(head + 32 + 4 * pair);
#endif
    return s;
}

// A row's numbers, less OFFSET.
inline float4 numbers_of(uint word, const uint upper, const int part, const int j) {
#if HAS_PAIRS
    word = word >> (2 * j) & 0x03030303u;
#if HAS_THIRD_BIT
    word |= (upper >> (4 * part + j) & 0x01010101u) << 2;
#endif
#elif !WEIGHT_IS(q8_0)
    word = word >> (4 * part) & 0x0f0f0f0fu;
#if WEIGHT_IS(q6_k)
    word |= (upper >> (2 * j) & 0x03030303u) << 4;
#elif HAS_FIFTH_BIT
    word |= (upper >> (4 * part + j) & 0x01010101u) << 4;
#elif HAS_FP4
    word = mxfp4_numbers(word);
#endif
#endif
#if HAS_TABLE
    word = table_numbers(word);
#endif
    return convert_float4(as_uchar4(word)) - (float)OFFSET;
}

inline void store_share(const share* s, __local float* rows, const int k, const int i) {
    const int part = k / 16 % 2, j = i / 8 % 4, pair = i % 8;
#if HAS_HIGH
    const uint2 upper = s->upper;
#else
    const uint2 upper = 0;
#endif
#if WEIGHT_IS(mxfp4)
    const float2 d = (float2)(mxfp4_scale(s->d & 255), mxfp4_scale(s->d >> 8));
#elif WEIGHT_IS(nvfp4)
    const float2 d = (float2)(nvfp4_scale(s->d & 255), nvfp4_scale(s->d >> 8));
#else
    float2 d = widen_f16(s->d);
#endif
#if IS_SUPER && HAS_MIN
    d *= (float2)(s->factors & 255, s->factors >> 8);
#elif HAS_HALF_MIN
    d *= (float2)(s->factors & 15, s->factors >> 8 & 15);
#elif IS_SUPER
    d *= SCALE_UNIT * convert_float2(as_char2(s->factors));
#endif
    float4 a = numbers_of(s->numbers.x, upper.x, part, j) * d.x, b = numbers_of(s->numbers.y, upper.y, part, j) * d.y;
#if HAS_MIN || HAS_HALF_MIN
    float2 m = widen_f16(s->m);
#if IS_SUPER
    m *= -(float2)(s->minima & 255, s->minima >> 8);
#endif
    a += m.x;
    b += m.y;
#endif
    __local float* to = rows + 4 * j * ROW_STRIDE + PLACE(i / 32) + 2 * pair;
    *(__local float2*)to = (float2)(a.x, b.x);
    *(__local float2*)(to + ROW_STRIDE) = (float2)(a.y, b.y);
    *(__local float2*)(to + 2 * ROW_STRIDE) = (float2)(a.z, b.z);
    *(__local float2*)(to + 3 * ROW_STRIDE) = (float2)(a.w, b.w);
}
#endif

// A weight's tiles on the device, for every storage type: the address of a tile, and single values.
//
// Floating-point tiles are [K][16]. Quantised tiles keep ggml's numbers and scales exactly, in another order
// (docs/design/layouts.md has drawings). Columns are divided into groups of 32; a group with 16 rows is
//
//   { scales of the 16 rows; quants: vector j of 64 bytes = 16 rows x 4 columns 4j .. 4j+3 }
//
//   q8_0       {16 half d}                    8 vectors of bytes q + 128              (q - 128) d
//   q4_0       {16 half d}                    4 vectors of nibbles                    (q - 8) d
//   q4_1       {16 half d, 16 half m}         4 vectors of nibbles                    q d + m
//   q5_0/q5_1  as q4_0/q4_1                   and 1 vector of fifth bits              (q - 16) d,  q d + m
//   q4_k/q5_k  {16 uchar sc, 16 uchar mn}     as q4_1/q5_1                            q (d sc) - (dmin mn)
//   q6_k       {16 char sc, 16 char sc}       4 vectors of nibbles, 2 of bit pairs    (q - 32) (d sc), sc for each 16 columns
//   mxfp4      {16 uchar scales}              4 vectors of nibbles, codes of q        (q - 12) d, see mxfp4.cl
//
// A byte of nibble vector j holds column 4j + b low and column 4j + b + 16 high; bit j of a fifth-bit byte belongs to vector j;
// bits 2(j % 4), 2(j % 4) + 1 of pair vector j / 4 belong to vector j. The k formats have 8 groups per super-block: { 16 half d,
// [16 half dmin], 8 groups }.
//
// Build: WEIGHT, K (a multiple of 32, or of 256, for quantised types).
#include "common/common.cl"
#include "common/mxfp4.cl"

#define ID_f32 0
#define ID_f16 1
#define ID_bf16 2
#define ID_q8_0 3
#define ID_q4_0 4
#define ID_q4_1 5
#define ID_q5_0 6
#define ID_q5_1 7
#define ID_q4_k 8
#define ID_q5_k 9
#define ID_q6_k 10
#define ID_mxfp4 11
#define WEIGHT_IS(name) (CAT(ID_, WEIGHT) == ID_##name)
#define QUANTIZED (CAT(ID_, WEIGHT) >= ID_q8_0)

typedef uchar q4_0_t;
typedef uchar q4_1_t;
typedef uchar q5_0_t;
typedef uchar q5_1_t;
typedef uchar q4_k_t;
typedef uchar q5_k_t;
typedef uchar q6_k_t;
typedef uchar mxfp4_t;

// For quantised types: bytes for 16 rows by 32 columns, for a super-block and for its head; the start of group g in a tile.
#define HAS_FIFTH_BIT (WEIGHT_IS(q5_0) || WEIGHT_IS(q5_1) || WEIGHT_IS(q5_k))
#define HAS_MIN (WEIGHT_IS(q4_1) || WEIGHT_IS(q5_1) || WEIGHT_IS(q4_k) || WEIGHT_IS(q5_k))
#define IS_SUPER (WEIGHT_IS(q4_k) || WEIGHT_IS(q5_k) || WEIGHT_IS(q6_k))
// The number to subtract from the stored number.
#define OFFSET_OF(IS) (IS(q8_0) ? 128 : IS(q6_k) ? 32 : IS(q5_0) ? 16 : IS(q4_0) ? 8 : IS(mxfp4) ? 12 : 0)
#define OFFSET OFFSET_OF(WEIGHT_IS)

#define SCALE_BYTES (WEIGHT_IS(mxfp4) ? 16 : WEIGHT_IS(q4_1) || WEIGHT_IS(q5_1) ? 64 : 32)
#define GROUP_BYTES (SCALE_BYTES + (WEIGHT_IS(q8_0) ? 512 : 256 + (HAS_FIFTH_BIT ? 64 : 0) + (WEIGHT_IS(q6_k) ? 128 : 0)))
#define HEAD_BYTES (WEIGHT_IS(q6_k) ? 32 : 64)
#define SUPER_BYTES (HEAD_BYTES + 8 * GROUP_BYTES)
#define GROUP_AT(g) (IS_SUPER ? (g) / 8 * SUPER_BYTES + HEAD_BYTES + (g) % 8 * GROUP_BYTES : (g) * GROUP_BYTES)

#if !QUANTIZED
#define TILE_SIZE ((size_t)K * 16)

inline float weight_at(__global const CAT(WEIGHT, _t)* tile, int k, int row) {
    return CAT(load1_, WEIGHT)(tile + (size_t)k * 16 + row);
}
#else
#define TILE_SIZE (IS_SUPER ? (size_t)(K / 256) * SUPER_BYTES : (size_t)(K / 32) * GROUP_BYTES)

inline float half_of(__global const uchar* p) { return vload_half(0, (__global const half*)p); }

// Returns (d, m) for a row in group g, columns from 16 half_index on: value = (q - OFFSET) d + m.
inline float2 scale_at(__global const uchar* tile, int g, int half_index, int row) {
    __global const uchar* group = tile + GROUP_AT(g);
#if IS_SUPER
    __global const uchar* head = tile + g / 8 * SUPER_BYTES + 2 * row;
#if HAS_MIN
    return (float2)(half_of(head) * (float)group[row], -(half_of(head + 32) * (float)group[16 + row]));
#else
    return (float2)(half_of(head) * (float)((__global const char*)group)[16 * half_index + row], 0.0f);
#endif
#elif WEIGHT_IS(mxfp4)
    return (float2)(mxfp4_scale(group[row]), 0.0f);
#elif HAS_MIN
    return (float2)(half_of(group + 2 * row), half_of(group + 32 + 2 * row));
#else
    return (float2)(half_of(group + 2 * row), 0.0f);
#endif
}

// Returns the stored numbers in columns 4j .. 4j+3 of a group, for a row.
inline uchar4 quants_at(__global const uchar* group, int j, int row) {
    __global const uchar* q = group + SCALE_BYTES + 4 * row;
#if WEIGHT_IS(q8_0)
    return vload4(0, q + 64 * j);
#else
    const uchar4 nibbles = vload4(0, q + 64 * (j % 4));
    uchar4 v = j < 4 ? nibbles & (uchar4)15 : nibbles >> (uchar4)4;
#if HAS_FIFTH_BIT
    v |= (vload4(0, q + 256) >> (uchar4)j & (uchar4)1) << (uchar4)4;
#elif WEIGHT_IS(q6_k)
    v |= (vload4(0, q + 256 + 64 * (j / 4)) >> (uchar4)(2 * (j % 4)) & (uchar4)3) << (uchar4)4;
#elif WEIGHT_IS(mxfp4)
    v = as_uchar4(mxfp4_numbers(as_uint(v)));
#endif
    return v;
#endif
}

// Returns the four values in columns k .. k+3 (k a multiple of 4) of a row.
inline float4 weights4_at(__global const uchar* tile, int k, int row) {
    const float2 scale = scale_at(tile, k / 32, k / 16 % 2, row);
    const float4 q = convert_float4(quants_at(tile + GROUP_AT(k / 32), k / 4 % 8, row)) - (float)OFFSET;
#if HAS_MIN
    return q * scale.x + scale.y;  // q d is exact in float32, so contraction changes nothing
#else
    return q * scale.x;
#endif
}

inline float weight_at(__global const uchar* tile, int k, int row) {
    const float4 v = weights4_at(tile, k & ~3, row);
    const int b = k & 3;
    return b < 2 ? (b == 0 ? v.x : v.y) : (b == 2 ? v.z : v.w);
}
#endif

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
//   nvfp4      {16 uchar, 16 uchar scales}    as mxfp4, a scale for each 16 columns
//   iq4_nl     {16 half d}                    4 vectors of nibbles, codes of q        (q - 128) d, see number_table.cl
//   q2_k       {16 uchar, 16 uchar}           2 vectors of bit pairs                  q (d sc) - (dmin mn), a byte is sc + 16 mn
//   q3_k       as q6_k                        2 vectors of bit pairs, 1 of third bits (q - 4) (d sc)
//   tq1_0/2_0  {16 char sc}, all 1            2 vectors of bit pairs                  (q - 1) (d sc)
//   iq4_xs, iq3_*           {16 char sc}      as iq4_nl                               (q - 128) (d sc) SCALE_UNIT
//   iq2_*, iq1_*            {16 char sc}, or as q6_k; as q3_k with codes of q         (q - 128) (d sc) SCALE_UNIT
//
// A byte of nibble vector j holds column 4j + b low and column 4j + b + 16 high; bit j of a fifth-bit or third-bit byte belongs to
// vector j; bits 2(j % 4), 2(j % 4) + 1 of pair vector j / 4 belong to vector j. Types with a char or an sc have 8 groups per
// super-block: { 16 half d, [16 half dmin], 8 groups }.
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
#define ID_nvfp4 12
#define ID_iq4_nl 13
#define ID_iq4_xs 14
#define ID_q2_k 15
#define ID_q3_k 16
#define ID_iq3_s 17
#define ID_iq3_xxs 18
#define ID_iq2_xxs 19
#define ID_iq2_xs 20
#define ID_iq2_s 21
#define ID_iq1_s 22
#define ID_iq1_m 23
#define ID_tq1_0 24
#define ID_tq2_0 25
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
typedef uchar nvfp4_t;
typedef uchar iq4_nl_t;
typedef uchar iq4_xs_t;
typedef uchar q2_k_t;
typedef uchar q3_k_t;
typedef uchar iq3_s_t;
typedef uchar iq3_xxs_t;
typedef uchar iq2_xxs_t;
typedef uchar iq2_xs_t;
typedef uchar iq2_s_t;
typedef uchar iq1_s_t;
typedef uchar iq1_m_t;
typedef uchar tq1_0_t;
typedef uchar tq2_0_t;

// For quantised types: bytes for 16 rows by 32 columns, for a super-block and for its head; the start of group g in a tile.
#define HAS_FIFTH_BIT (WEIGHT_IS(q5_0) || WEIGHT_IS(q5_1) || WEIGHT_IS(q5_k))
#define HAS_MIN (WEIGHT_IS(q4_1) || WEIGHT_IS(q5_1) || WEIGHT_IS(q4_k) || WEIGHT_IS(q5_k))
// Codes of numbers, 3 or 4 bits, looked up in a table.
#define HAS_TABLE_OF(IS) \
    (IS(iq4_nl) || IS(iq4_xs) || IS(iq3_s) || IS(iq3_xxs) || IS(iq2_xxs) || IS(iq2_xs) || IS(iq2_s) || IS(iq1_s) || IS(iq1_m))
#define HAS_TABLE HAS_TABLE_OF(WEIGHT_IS)
#define HAS_FP4 (WEIGHT_IS(mxfp4) || WEIGHT_IS(nvfp4))
#define HAS_THIRD_BIT \
    (WEIGHT_IS(q3_k) || WEIGHT_IS(iq2_xxs) || WEIGHT_IS(iq2_xs) || WEIGHT_IS(iq2_s) || WEIGHT_IS(iq1_s) || WEIGHT_IS(iq1_m))
#define HAS_PAIRS (HAS_THIRD_BIT || WEIGHT_IS(q2_k) || WEIGHT_IS(tq1_0) || WEIGHT_IS(tq2_0))  // numbers begin with two bits, not four
// A scale, and with q2_k a minimum, for each 16 columns.
#define HAS_HALF_SCALES_OF(IS) (IS(q6_k) || IS(q3_k) || IS(q2_k) || IS(iq2_xs) || IS(iq2_s) || IS(iq1_m) || IS(nvfp4))
#define HAS_HALF_SCALES HAS_HALF_SCALES_OF(WEIGHT_IS)
#define HAS_HALF_MIN WEIGHT_IS(q2_k)
// The offset in the records of rounded activations (cpu/quant_tile.cl); with q2_k the records are for minima.
#define RECORD_OFFSET_OF(IS) (IS(q2_k) ? -1 : OFFSET_OF(IS))
#define IS_SUPER \
    (WEIGHT_IS(q4_k) || WEIGHT_IS(q5_k) || WEIGHT_IS(q6_k) || HAS_PAIRS || HAS_TABLE && !WEIGHT_IS(iq4_nl))
// The number to subtract from the stored number.
#define OFFSET_OF(IS)                                                                                          \
    (IS(q8_0) || HAS_TABLE_OF(IS)   ? 128                                                                      \
     : IS(q6_k)                     ? 32                                                                       \
     : IS(q5_0)                     ? 16                                                                       \
     : IS(mxfp4) || IS(nvfp4)       ? 12                                                                       \
     : IS(q4_0)                     ? 8                                                                        \
     : IS(q3_k)                     ? 4                                                                        \
     : IS(tq1_0) || IS(tq2_0)       ? 1                                                                        \
                                    : 0)
#define OFFSET OFFSET_OF(WEIGHT_IS)
// The iq formats' scales are fractions: an odd number over a power of two.
#define SCALE_UNIT \
    (WEIGHT_IS(iq3_xxs) ? 0.25f : HAS_TABLE && HAS_PAIRS ? 0.125f : 1.0f)

#define SCALE_BYTES \
    (WEIGHT_IS(q4_1) || WEIGHT_IS(q5_1) ? 64 : WEIGHT_IS(mxfp4) || IS_SUPER && !HAS_HALF_SCALES && !HAS_MIN ? 16 : 32)
#define HIGH_AT (HAS_PAIRS ? 128 : 256)  // upper bits, from the first vector on
#define GROUP_BYTES \
    (SCALE_BYTES + (WEIGHT_IS(q8_0) ? 512 : HIGH_AT + (HAS_FIFTH_BIT || HAS_THIRD_BIT ? 64 : 0) + (WEIGHT_IS(q6_k) ? 128 : 0)))
#define HEAD_BYTES (HAS_MIN || HAS_HALF_MIN ? 64 : 32)
#define SUPER_BYTES (HEAD_BYTES + 8 * GROUP_BYTES)
#define GROUP_AT(g) (IS_SUPER ? (g) / 8 * SUPER_BYTES + HEAD_BYTES + (g) % 8 * GROUP_BYTES : (g) * GROUP_BYTES)

#if !QUANTIZED
#define TILE_SIZE ((size_t)K * 16)

inline float weight_at(__global const CAT(WEIGHT, _t)* tile, int k, int row) {
    return CAT(load1_, WEIGHT)(tile + (size_t)k * 16 + row);
}
#else
#define TILE_SIZE (IS_SUPER ? (size_t)(K / 256) * SUPER_BYTES : (size_t)(K / 32) * GROUP_BYTES)

#if HAS_TABLE
#define NUMBER_TABLE                                                   \
    (WEIGHT_IS(iq4_nl) || WEIGHT_IS(iq4_xs) ? TABLE_IQ4                \
     : WEIGHT_IS(iq3_s)                     ? TABLE_IQ3_S              \
     : WEIGHT_IS(iq3_xxs)                   ? TABLE_IQ3_XXS            \
     : WEIGHT_IS(iq1_s) || WEIGHT_IS(iq1_m) ? TABLE_IQ1                \
                                            : TABLE_IQ2)
#include "common/number_table.cl"
#endif

inline float half_of(__global const uchar* p) { return vload_half(0, (__global const half*)p); }

// Returns (d, m) for a row in group g, columns from 16 half_index on: value = (q - OFFSET) d + m.
inline float2 scale_at(__global const uchar* tile, int g, int half_index, int row) {
    __global const uchar* group = tile + GROUP_AT(g);
#if IS_SUPER
    __global const uchar* head = tile + g / 8 * SUPER_BYTES + 2 * row;
#if HAS_MIN
    return (float2)(half_of(head) * (float)group[row], -(half_of(head + 32) * (float)group[16 + row]));
#elif HAS_HALF_MIN
    const uchar sub = group[16 * half_index + row];
    return (float2)(half_of(head) * (float)(sub & 15), -(half_of(head + 32) * (float)(sub >> 4)));
#else
    const char sub = ((__global const char*)group)[(HAS_HALF_SCALES ? 16 * half_index : 0) + row];
    return (float2)(half_of(head) * SCALE_UNIT * (float)sub, 0.0f);
#endif
#elif WEIGHT_IS(mxfp4)
    return (float2)(mxfp4_scale(group[row]), 0.0f);
#elif WEIGHT_IS(nvfp4)
    return (float2)(nvfp4_scale(group[16 * half_index + row]), 0.0f);
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
#elif HAS_PAIRS
    uchar4 v = vload4(0, q + 64 * (j / 4)) >> (uchar4)(2 * (j % 4)) & (uchar4)3;
#if HAS_THIRD_BIT
    v |= (vload4(0, q + 128) >> (uchar4)j & (uchar4)1) << (uchar4)2;
#endif
#if HAS_TABLE
    v = as_uchar4(table_numbers(as_uint(v)));
#endif
    return v;
#else
    const uchar4 nibbles = vload4(0, q + 64 * (j % 4));
    uchar4 v = j < 4 ? nibbles & (uchar4)15 : nibbles >> (uchar4)4;
#if HAS_FIFTH_BIT
    v |= (vload4(0, q + 256) >> (uchar4)j & (uchar4)1) << (uchar4)4;
#elif WEIGHT_IS(q6_k)
    v |= (vload4(0, q + 256 + 64 * (j / 4)) >> (uchar4)(2 * (j % 4)) & (uchar4)3) << (uchar4)4;
#elif HAS_FP4
    v = as_uchar4(mxfp4_numbers(as_uint(v)));
#elif HAS_TABLE
    v = as_uchar4(table_numbers(as_uint(v)));
#endif
    return v;
#endif
}

// Returns the four values in columns k .. k+3 (k a multiple of 4) of a row.
inline float4 weights4_at(__global const uchar* tile, int k, int row) {
    const float2 scale = scale_at(tile, k / 32, k / 16 % 2, row);
    const float4 q = convert_float4(quants_at(tile + GROUP_AT(k / 32), k / 4 % 8, row)) - (float)OFFSET;
#if HAS_MIN || HAS_HALF_MIN
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

// The matrix units of Intel's GPUs (XMX), by sub-groups of 8 lanes:
//
//   matrix_mad(a, b, acc):  acc[m] in lane n += sum over k < 16 of A[m][k] B[k][n]       m, n < 8
//
//   a  int8: for row m, a[m] in lane l has A[m][2l] low and A[m][2l + 1] high       16 bits each, bfloat16 or float16
//   b  int8: b[j] in lane n has B[2j][n] low and B[2j + 1][n] high
//
// Build: WEIGHT (bf16 or f16), MATRIX (intel/matrix_mad.py): MATRIX_XMX uses cl_intel_subgroup_matrix_multiply_accumulate;
// MATRIX_EMULATED computes the same without matrix units, for testing the surrounding code on drivers with sub-groups only.
#define MATRIX_XMX 1
#define MATRIX_EMULATED 2

#if MATRIX == MATRIX_XMX
#ifndef cl_intel_subgroup_matrix_multiply_accumulate  // an offline compiler knows the functions but does not declare them
float8 __attribute__((overloadable)) intel_sub_group_bf16_bf16_matrix_mad_k16(int8 a, int8 b, float8 acc);
float8 __attribute__((overloadable)) intel_sub_group_f16_f16_matrix_mad_k16(int8 a, int8 b, float8 acc);
#endif
#define MATRIX_MAD_bf16 intel_sub_group_bf16_bf16_matrix_mad_k16
#define MATRIX_MAD_f16 intel_sub_group_f16_f16_matrix_mad_k16
#define matrix_mad(a, b, acc) CAT(MATRIX_MAD_, WEIGHT)(a, b, acc)
#elif MATRIX == MATRIX_EMULATED
#include "portable/widen.cl"

inline float row_of_mad(const int a, const int8 b, float sum) {
    const int words[8] = {b.s0, b.s1, b.s2, b.s3, b.s4, b.s5, b.s6, b.s7};
    for (int l = 0; l < 8; ++l) {
        const float2 v = CAT(widen_, WEIGHT)((uint)intel_sub_group_shuffle(a, l)), w = CAT(widen_, WEIGHT)((uint)words[l]);
        sum += v.x * w.x + v.y * w.y;
    }
    return sum;
}
inline float8 matrix_mad(const int8 a, const int8 b, const float8 acc) {
    return (float8)(row_of_mad(a.s0, b, acc.s0), row_of_mad(a.s1, b, acc.s1), row_of_mad(a.s2, b, acc.s2),
                    row_of_mad(a.s3, b, acc.s3), row_of_mad(a.s4, b, acc.s4), row_of_mad(a.s5, b, acc.s5),
                    row_of_mad(a.s6, b, acc.s6), row_of_mad(a.s7, b, acc.s7));
}
#else
#error "intel/matrix_mad.cl needs the build constant MATRIX, 1 or 2"
#endif

// out[n][m] = sum over k < 16 of a[m][k] b[k][n], m, n < 8: tests whether the matrix units multiply as intel/matrix_mad.cl expects.
// a  16 bits [8][16]     b  16 bits [8][8][2]: k = 2j + c, column n at [j][n][c]     out  float [8][8]
// Index space: a single group with 8 work-items. Build: WEIGHT (bf16 or f16), MATRIX.
#if !defined(WEIGHT) || !defined(MATRIX)
#error "intel/matrix_probe.cl needs the build constants WEIGHT, MATRIX"
#endif
#include "common/common.cl"
#include "intel/matrix_mad.cl"

__kernel __attribute__((reqd_work_group_size(8, 1, 1))) __attribute__((intel_reqd_sub_group_size(8)))
void matrix_probe(__global const uint* a, __global const uint* b, __global float* out) {
    const int8 rows = as_int8(intel_sub_group_block_read8(a)), columns = as_int8(intel_sub_group_block_read8(b));
    float8 acc = 0.0f;
    acc = matrix_mad(rows, columns, acc);
    vstore8(acc, get_local_id(0), out);
}

// x[t] -= mean(x[t]), in place. The RMS norm of the result is the layer norm of x without a bias.
//
// x  float [n][COLUMNS]
// Index space: a work-group per token, local size LOCAL_SIZE; each work-item takes every LOCAL_SIZE-th 16-value piece.
// Build: COLUMNS (a multiple of 16), LOCAL_SIZE (a power of two). Local memory: 4 LOCAL_SIZE bytes.
#if !defined(COLUMNS) || !defined(LOCAL_SIZE)
#error "center_rows.cl needs the build constants COLUMNS, LOCAL_SIZE"
#endif
#include "common/common.cl"
#include "common/reduce.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void center_rows(__global float* x) {
    LOCAL_SCRATCH(float, scratch);
    const int lid = get_local_id(0);
    x += (size_t)get_group_id(0) * COLUMNS;
    float16 sums = 0;
    for (int i = lid; i < COLUMNS / 16; i += LOCAL_SIZE) sums += load16_f32(x + i * 16);
    const float mean = reduce_sum(sum16(sums), scratch, lid) / COLUMNS;
    for (int i = lid; i < COLUMNS / 16; i += LOCAL_SIZE) store16_f32(load16_f32(x + i * 16) - mean, x + i * 16);
}

// out[t] = mean of the rows x[N_ROWS t] to x[N_ROWS t + N_ROWS - 1]
//
// x  float [N_ROWS n][COLUMNS]      out  float [n][COLUMNS]
// Index space: (COLUMNS / 16, n) in groups of (LOCAL_SIZE, 1), rounded up; a work-item takes 16 columns of a result.
// Build: N_ROWS, COLUMNS (a multiple of 16), LOCAL_SIZE.
#if !defined(N_ROWS) || !defined(COLUMNS) || !defined(LOCAL_SIZE)
#error "mean_rows.cl needs the build constants N_ROWS, COLUMNS, LOCAL_SIZE"
#endif
#include "common/common.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void mean_rows(__global const float* x, __global float* out) {
    const int i = get_global_id(0);
    if (i >= COLUMNS / 16) return;
    const size_t t = get_group_id(1);
    x += t * N_ROWS * COLUMNS + i * 16;
    float16 sum = 0;
    for (int row = 0; row < N_ROWS; row++) sum += load16_f32(x + row * COLUMNS);
    store16_f32(sum / N_ROWS, out + t * COLUMNS + i * 16);
}

// x[t] *= factor[0], in place; with PER_ROW, x[t] *= factor[t].
//
// x  float [n][COLUMNS]      factor  float [1], or [n]
// Index space: groups (ceil(COLUMNS / (16 RUN)), n), local size LOCAL_SIZE; a group's work-items share RUN 16-wide pieces.
// Build: COLUMNS (a multiple of 16), RUN (a multiple of LOCAL_SIZE), LOCAL_SIZE.
#if !defined(COLUMNS) || !defined(RUN) || !defined(LOCAL_SIZE)
#error "scale_rows.cl needs the build constants COLUMNS, RUN, LOCAL_SIZE"
#endif
#ifndef PER_ROW
#define PER_ROW 0
#endif
#include "common/common.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void scale_rows(__global float* x, __global const float* factor) {
    x += (size_t)get_group_id(1) * COLUMNS;
    for (int piece = get_local_id(0); piece < RUN; piece += LOCAL_SIZE) {
        const int i = (get_group_id(0) * RUN + piece) * 16;
        if (i < COLUMNS) store16_f32(load16_f32(x + i) * factor[PER_ROW ? get_group_id(1) : 0], x + i);
    }
}

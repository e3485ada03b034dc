// x[t] = max(x[t], 0)^2, in place: the activation of an MLP without a gate (So et al., "Primer", 2021).
//
// x  float [n][COLUMNS]
// Index space: groups (ceil(COLUMNS / (16 RUN)), n), local size LOCAL_SIZE; a group's work-items share RUN 16-wide pieces.
// Build: COLUMNS (a multiple of 16), RUN (a multiple of LOCAL_SIZE), LOCAL_SIZE.
#if !defined(COLUMNS) || !defined(RUN) || !defined(LOCAL_SIZE)
#error "squared_relu.cl needs the build constants COLUMNS, RUN, LOCAL_SIZE"
#endif
#include "common/common.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void squared_relu(__global float* x) {
    x += (size_t)get_group_id(1) * COLUMNS;
    for (int piece = get_local_id(0); piece < RUN; piece += LOCAL_SIZE) {
        const int i = (get_group_id(0) * RUN + piece) * 16;
        if (i >= COLUMNS) continue;
        const float16 value = load16_f32(x + i);
        store16_f32(SQUARED_RELU(value, float16), x + i);
    }
}

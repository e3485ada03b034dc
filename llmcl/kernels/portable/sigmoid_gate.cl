// x[t] *= sigmoid(gate[t]): the gate of an attention's output
//
// x, gate  float [n][COLUMNS]
// Index space: groups (ceil(COLUMNS / (WIDTH RUN)), n) of LOCAL_SIZE; a group's work-items share RUN pieces of WIDTH values.
// Build: COLUMNS (a multiple of 16), RUN (a multiple of LOCAL_SIZE), LOCAL_SIZE, WIDTH (lanes.cl).
#if !defined(COLUMNS) || !defined(RUN) || !defined(LOCAL_SIZE) || !defined(WIDTH)
#error "sigmoid_gate.cl needs the build constants COLUMNS, RUN, LOCAL_SIZE, WIDTH"
#endif
#include "common/common.cl"
#include "common/lanes.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void sigmoid_gate(__global float* x, __global const float* gate) {
    x += (size_t)get_group_id(1) * COLUMNS;
    gate += (size_t)get_group_id(1) * COLUMNS;
    for (int piece = get_local_id(0); piece < RUN; piece += LOCAL_SIZE) {
        const int i = (get_group_id(0) * RUN + piece) * WIDTH;
        if (i >= COLUMNS) continue;
        store_lanes(load_lanes(x + i) / (1.0f + lanes_exp(-load_lanes(gate + i))), x + i);
    }
}

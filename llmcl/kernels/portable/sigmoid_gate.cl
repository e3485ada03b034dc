// x[t] *= sigmoid(gate[t]): gates an attention output, or a shared expert's output
//
// x     float [n][COLUMNS]
// gate  float [n][COLUMNS]; or (ONE_A_ROW) [n][GATE_ROW], with the row's last value gating all of x[t]
// Index space: groups (ceil(COLUMNS / (WIDTH RUN)), n), local size LOCAL_SIZE; a group's work-items share RUN WIDTH-wide pieces.
// Build: COLUMNS (a multiple of 16), GATE_ROW, ONE_A_ROW, RUN (a multiple of LOCAL_SIZE), LOCAL_SIZE, WIDTH (lanes.cl).
#if !defined(COLUMNS) || !defined(GATE_ROW) || !defined(ONE_A_ROW) || !defined(RUN) || !defined(LOCAL_SIZE) || !defined(WIDTH)
#error "sigmoid_gate.cl needs the build constants COLUMNS, GATE_ROW, ONE_A_ROW, RUN, LOCAL_SIZE, WIDTH"
#endif
#include "common/common.cl"
#include "common/lanes.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void sigmoid_gate(__global float* x, __global const float* gate) {
    x += (size_t)get_group_id(1) * COLUMNS;
    gate += (size_t)get_group_id(1) * GATE_ROW;
    for (int piece = get_local_id(0); piece < RUN; piece += LOCAL_SIZE) {
        const int i = (get_group_id(0) * RUN + piece) * WIDTH;
        if (i >= COLUMNS) continue;
#if ONE_A_ROW
        const lanes_t of_piece = gate[GATE_ROW - 1];
#else
        const lanes_t of_piece = load_lanes(gate + i);
#endif
        store_lanes(load_lanes(x + i) / (1.0f + lanes_exp(-of_piece)), x + i);
    }
}

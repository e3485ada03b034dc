// gate[t] = GATE(gate[t]) x[t]          (GATE: silu or gelu, see common.cl)
//
// gate  float [n][COLUMNS]      x  float [n][ROW], used: COLUMNS values from FIRST on
// Index space: groups (ceil(COLUMNS / (16 RUN)), n), local size LOCAL_SIZE; a group's work-items share RUN 16-wide pieces.
// Build: COLUMNS, ROW, FIRST (multiples of 16), GATE, RUN (a multiple of LOCAL_SIZE), LOCAL_SIZE.
#if !defined(COLUMNS) || !defined(ROW) || !defined(FIRST) || !defined(GATE) || !defined(RUN) || !defined(LOCAL_SIZE)
#error "gate_inputs.cl needs the build constants COLUMNS, ROW, FIRST, GATE, RUN, LOCAL_SIZE"
#endif
#include "common/common.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void gate_inputs(__global float* gate, __global const float* x) {
    gate += (size_t)get_group_id(1) * COLUMNS;
    x += (size_t)get_group_id(1) * ROW + FIRST;
    for (int piece = get_local_id(0); piece < RUN; piece += LOCAL_SIZE) {
        const int i = (get_group_id(0) * RUN + piece) * 16;
        if (i >= COLUMNS) continue;
        const float16 value = load16_f32(gate + i);
        store16_f32(GATE_VALUE(value, exp16) * load16_f32(x + i), gate + i);
    }
}

// out[t] = GATE(gate[t] + bias[0]) (up[t] + bias[1])          (GATE: silu or gelu, see common.cl)
//
// gate_up  float [n][2 COLUMNS]: alternating 16-column tiles, gate then up, as the combined product writes them
// bias     float [2][COLUMNS]: gate, up                      out  float [n][COLUMNS]
// Index space: groups (ceil(COLUMNS / (16 RUN)), n), local size LOCAL_SIZE; a group's work-items share RUN 16-wide pieces.
// Build: COLUMNS (a multiple of 16), GATE, RUN (a multiple of LOCAL_SIZE), LOCAL_SIZE.
#if !defined(COLUMNS) || !defined(GATE) || !defined(RUN) || !defined(LOCAL_SIZE)
#error "biased_gate.cl needs the build constants COLUMNS, GATE, RUN, LOCAL_SIZE"
#endif
#include "common/common.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void biased_gate(__global const float* gate_up, __global const float* bias, __global float* out) {
    gate_up += (size_t)get_group_id(1) * 2 * COLUMNS;
    out += (size_t)get_group_id(1) * COLUMNS;
    for (int piece = get_local_id(0); piece < RUN; piece += LOCAL_SIZE) {
        const int i = (get_group_id(0) * RUN + piece) * 16;
        if (i >= COLUMNS) continue;
        const float16 gate = load16_f32(gate_up + 2 * i) + load16_f32(bias + i);
        const float16 up = load16_f32(gate_up + 2 * i + 16) + load16_f32(bias + COLUMNS + i);
        store16_f32(GATE_VALUE(gate, exp16) * up, out + i);
    }
}

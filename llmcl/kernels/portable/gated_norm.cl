// Normalises each value head of the delta rule and applies its gate, in place:
//
//   x[t][h] = x[t][h] / sqrt(mean(x[t][h]^2) + EPS) * weight * silu(gate[t][h])
//
// With GATE_FIRST (Mamba-2, whose heads are groups of channels) x[t][h] silu(gate[t][h]) is normalised.
//
// x       float [n][HEADS][COLUMNS]     weight  float [COLUMNS], or with GATE_FIRST [HEADS][COLUMNS]
// rows    float [n][ROW]: the gates are the HEADS COLUMNS values from GATES on
// Index space: groups (ceil(HEADS / HEADS_PER_GROUP), n), local size LOCAL_SIZE; a group's work-items share its heads' columns.
// Build: GATE_FIRST, HEADS, COLUMNS (a multiple of 16), ROW, GATES, EPS, HEADS_PER_GROUP, LOCAL_SIZE (a power of two), WIDTH (lanes.cl).
// Local memory: 4 LOCAL_SIZE bytes.
#if !defined(HEADS) || !defined(COLUMNS) || !defined(ROW) || !defined(GATES) || !defined(EPS) || !defined(HEADS_PER_GROUP) || \
    !defined(LOCAL_SIZE) || !defined(WIDTH) || !defined(GATE_FIRST)
#error "gated_norm.cl needs GATE_FIRST, HEADS, COLUMNS, ROW, GATES, EPS, HEADS_PER_GROUP, LOCAL_SIZE, WIDTH"
#endif
#include "common/common.cl"
#include "common/lanes.cl"
#include "common/reduce.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void gated_norm(__global float* x, __global const float* weight, __global const float* rows) {
    LOCAL_SCRATCH(float, scratch);
    const int lid = get_local_id(0), t = get_group_id(1);
    for (int j = 0; j < HEADS_PER_GROUP; ++j) {
        const int head = get_group_id(0) * HEADS_PER_GROUP + j;
        if (head >= HEADS) break;
        __global float* of_head = x + ((size_t)t * HEADS + head) * COLUMNS;
        __global const float* gates = rows + (size_t)t * ROW + GATES + head * COLUMNS;
        lanes_t squares = 0;
        for (int i = lid * WIDTH; i < COLUMNS; i += LOCAL_SIZE * WIDTH) {
            lanes_t value = load_lanes(of_head + i);
#if GATE_FIRST
            const lanes_t gate = load_lanes(gates + i);
            value = value * gate / (1.0f + lanes_exp(-gate));
            store_lanes(value, of_head + i);  // the same work-item reads it below
#endif
            squares += value * value;
        }
        const float sum = reduce_sum(lanes_sum(squares), scratch, lid);
        const float scale = 1.0f / sqrt(NO_OVERFLOW(sum) / COLUMNS + EPS);
        for (int i = lid * WIDTH; i < COLUMNS; i += LOCAL_SIZE * WIDTH) {
#if GATE_FIRST
            store_lanes(load_lanes(of_head + i) * scale * load_lanes(weight + head * COLUMNS + i), of_head + i);
#else
            const lanes_t gate = load_lanes(gates + i);
            const lanes_t y = load_lanes(of_head + i) * scale * load_lanes(weight + i);
            store_lanes(y * gate / (1.0f + lanes_exp(-gate)), of_head + i);
#endif
        }
    }
}

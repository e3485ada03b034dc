// x[t] += its experts' outputs, in place: sum_s y[t][s].
//
// y  OUTPUTS [n][TOP_K][COLUMNS]     x  float [n][COLUMNS]
// Index space: groups (ceil(COLUMNS / (16 RUN)), n), local size LOCAL_SIZE; a group's work-items share RUN 16-wide pieces.
// Build: COLUMNS (a multiple of 16), TOP_K, RUN (a multiple of LOCAL_SIZE), LOCAL_SIZE, OUTPUTS (f32, f16 or bf16).
#if !defined(COLUMNS) || !defined(TOP_K) || !defined(RUN) || !defined(LOCAL_SIZE) || !defined(OUTPUTS)
#error "experts_sum.cl needs the build constants COLUMNS, TOP_K, RUN, LOCAL_SIZE, OUTPUTS"
#endif
#include "common/common.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void experts_sum(__global const CAT(OUTPUTS, _t)* y, __global float* x) {
    y += (size_t)get_group_id(1) * TOP_K * COLUMNS;
    x += (size_t)get_group_id(1) * COLUMNS;
    for (int piece = get_local_id(0); piece < RUN; piece += LOCAL_SIZE) {
        const int i = (get_group_id(0) * RUN + piece) * 16;
        if (i >= COLUMNS) continue;
        float16 sum = load16_f32(x + i);
        for (int s = 0; s < TOP_K; ++s) sum += CAT(load16_, OUTPUTS)(y + (size_t)s * COLUMNS + i);
        store16_f32(sum, x + i);
    }
}

// x[t] = alpha_p x^2 + beta x where x > 0, else alpha_n (exp(min(x, eps)) - 1 - x) + beta x, in place
//
// (xIELU: Huang and Schlag, "Deriving Activation Functions Using Integration", 2024)
//
// x  float [n][COLUMNS]      curve  float [4]: alpha_p, alpha_n - beta, beta, eps
// Index space: groups (ceil(COLUMNS / (16 RUN)), n), local size LOCAL_SIZE; a group's work-items share RUN 16-wide pieces.
// Build: COLUMNS (a multiple of 16), RUN (a multiple of LOCAL_SIZE), LOCAL_SIZE.
#if !defined(COLUMNS) || !defined(RUN) || !defined(LOCAL_SIZE)
#error "xielu.cl needs the build constants COLUMNS, RUN, LOCAL_SIZE"
#endif
#include "common/common.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void xielu(__global float* x, __global const float* curve) {
    const float alpha_p = curve[0], alpha_n = curve[1] + curve[2], beta = curve[2], eps = curve[3];
    x += (size_t)get_group_id(1) * COLUMNS;
    for (int piece = get_local_id(0); piece < RUN; piece += LOCAL_SIZE) {
        const int i = (get_group_id(0) * RUN + piece) * 16;
        if (i >= COLUMNS) continue;
        const float16 v = load16_f32(x + i);
        const float16 below = alpha_n * (expm1(fmin(v, eps)) - v), above = alpha_p * v * v;
        store16_f32(select(below, above, v > 0.0f) + beta * v, x + i);
    }
}

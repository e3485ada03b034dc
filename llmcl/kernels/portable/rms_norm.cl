// out[t] = x[t] / sqrt(mean(x[t]^2) + EPS) * weight          (Zhang and Sennrich, "Root Mean Square Layer Normalization")
//
// If the squares of a token overflow, its result is NaN (common.cl).
//
// With ADD, out[t] += the result: normalises an attention or MLP output and adds it to the residual.
//
// x, out  float [n][ROW], with HIDDEN values from FIRST on normalised; may be the same buffer
// weight  float [HIDDEN]
// Index space: a work-group per token, local size LOCAL_SIZE; each work-item takes every LOCAL_SIZE-th 16-value piece.
// Build: HIDDEN, ROW, FIRST (multiples of 16), EPS, ADD, LOCAL_SIZE (a power of two). Local memory: 4 LOCAL_SIZE bytes.
#if !defined(HIDDEN) || !defined(ROW) || !defined(FIRST) || !defined(EPS) || !defined(ADD) || !defined(LOCAL_SIZE)
#error "rms_norm.cl needs the build constants HIDDEN, ROW, FIRST, EPS, ADD, LOCAL_SIZE"
#endif
#include "common/common.cl"
#include "common/reduce.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void rms_norm(__global const float* x, __global const float* weight, __global float* out) {
    LOCAL_SCRATCH(float, scratch);
    const int lid = get_local_id(0);
    x += (size_t)get_group_id(0) * ROW + FIRST;
    out += (size_t)get_group_id(0) * ROW + FIRST;

    float16 squares = 0;
    for (int i = lid; i < HIDDEN / 16; i += LOCAL_SIZE) {
        const float16 v = load16_f32(x + i * 16);
        squares += v * v;
    }
    const float sum = reduce_sum(sum16(squares), scratch, lid);
    const float scale = 1.0f / sqrt(NO_OVERFLOW(sum) / HIDDEN + EPS);
    for (int i = lid; i < HIDDEN / 16; i += LOCAL_SIZE) {
        float16 y = load16_f32(x + i * 16) * scale * load16_f32(weight + i * 16);
#if ADD
        y += load16_f32(out + i * 16);
#endif
        store16_f32(y, out + i * 16);
    }
}

// out[t] = (x[t] - mean(x[t])) / sqrt(var(x[t]) + EPS) * weight + bias      (Ba et al., "Layer Normalization", 2016)
//
// x, out  float [n][HIDDEN], possibly the same      weight, bias  float [HIDDEN]
// The variance is the mean of squared differences from the mean. If squares overflow, the result is NaN (common.cl).
// Index space: a work-group per token, local size LOCAL_SIZE; each work-item takes every LOCAL_SIZE-th 16-value piece.
// Build: HIDDEN (a multiple of 16), EPS, LOCAL_SIZE (a power of two). Local memory: 4 LOCAL_SIZE bytes.
// Float32 sums; within 1e-5 of float64 relative to the largest value.
#if !defined(HIDDEN) || !defined(EPS) || !defined(LOCAL_SIZE)
#error "layer_norm.cl needs the build constants HIDDEN, EPS, LOCAL_SIZE"
#endif
#include "common/common.cl"
#include "common/reduce.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void layer_norm(__global const float* x, __global const float* weight, __global const float* bias, __global float* out) {
    LOCAL_SCRATCH(float, scratch);
    const int lid = get_local_id(0);
    x += (size_t)get_group_id(0) * HIDDEN;
    out += (size_t)get_group_id(0) * HIDDEN;

    float16 sums = 0;
    for (int i = lid; i < HIDDEN / 16; i += LOCAL_SIZE) sums += load16_f32(x + i * 16);
    const float mean = reduce_sum(sum16(sums), scratch, lid) / HIDDEN;
    float16 squares = 0;
    for (int i = lid; i < HIDDEN / 16; i += LOCAL_SIZE) {
        const float16 v = load16_f32(x + i * 16) - mean;
        squares += v * v;
    }
    const float sum = reduce_sum(sum16(squares), scratch, lid);
    const float scale = 1.0f / sqrt(NO_OVERFLOW(sum) / HIDDEN + EPS);
    for (int i = lid; i < HIDDEN / 16; i += LOCAL_SIZE) {
        const float16 normed = (load16_f32(x + i * 16) - mean) * scale;
        store16_f32(normed * load16_f32(weight + i * 16) + load16_f32(bias + i * 16), out + i * 16);
    }
}

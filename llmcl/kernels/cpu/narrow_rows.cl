// The activations of a step, rounded to bfloat16 (to nearest, ties to even) for products with bfloat16 weights.
//
// x  float [n][K]     to  bfloat16 [n][K]
// Index space: one work-group of one work-item a token. Build: K (a multiple of 16).
#if !defined(K)
#error "cpu/narrow_rows.cl needs the build constant K"
#endif
#include "common.cl"

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void narrow_rows(__global const float* x, __global bf16_t* to) {
    const size_t t = get_group_id(0);
    x += t * K;
    to += t * K;
    for (int k = 0; k < K; k += 16) {
        *(__global ushort16*)(to + k) = CONVERT16(round16_bf16(load16_f32(x + k)) >> 16, ushort);
    }
}

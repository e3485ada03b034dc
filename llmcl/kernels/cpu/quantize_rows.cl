// The activations of a step, rounded to 8 bits for products with quantised weights (see cpu/quant_tile.cl).
//
// x  float [n][K]     xq  char [n][K]     records  float4 [n][K/32]: (s, -OFFSET sums of each 16 xq as ints, s sum xq)
//
// Index space: one work-group of one work-item a token. Build: WEIGHT (for its OFFSET), K, DOT > 0.
#if !defined(WEIGHT) || !defined(K) || !defined(DOT)
#error "cpu/quantize_rows.cl needs the build constants WEIGHT, K, DOT"
#endif
#include "cpu/quant_tile.cl"

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void quantize_rows(__global const float* x, __global char* xq, __global float4* records) {
    const size_t t = get_group_id(0);
    x += t * K;
    xq += t * K;
    records += t * (K / 32);
    for (int g = 0; g < K / 32; ++g) {
        char16 q[2];
        records[g] = quantize_group(load16_f32(x + 32 * g), load16_f32(x + 32 * g + 16), q);
        *(__global char16*)(xq + 32 * g) = q[0];
        *(__global char16*)(xq + 32 * g + 16) = q[1];
    }
}

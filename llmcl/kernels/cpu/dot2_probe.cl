// out[lane] = sum_i w[i][lane][0..1] . x[i][0..1], i < 64: does dot2 work here? Run in a child process only.
// w  bfloat16 [64][16][2]     x  bfloat16 [64][2]     out  float [16]     One work-item. Build: DOT.
#ifndef DOT
#error "cpu/dot2_probe.cl needs the build constant DOT"
#endif
#include "cpu/dot2.cl"

__kernel void dot2_probe(__global const uint16* w, __global const uint* x, __global float16* out) {
    float16 a = 0, b = 0;
    for (int i = 0; i < 64; i += 2) {
        a = dot2(a, w[i], x[i]);
        b = dot2(b, w[i + 1], x[i + 1]);
    }
    *out = a + b;
}

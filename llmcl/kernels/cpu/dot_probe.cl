// out[lane] = sum_i w[i][lane][0..3] . x[i][0..3], i < 64: does dot4 work here? Run in a child process only.
// w  uchar [64][16][4]     x  char [64][4]     out  int [16]     One work-item. Build: DOT.
#ifndef DOT
#error "cpu/dot_probe.cl needs the build constant DOT"
#endif
#include "cpu/dot4.cl"

__kernel void dot_probe(__global const uint16* w, __global const int* x, __global int16* out) {
    int16 a = 0, b = 0;
    for (int i = 0; i < 64; i += 2) {
        a = dot4(a, w[i], x[i]);
        b = dot4(b, w[i + 1], x[i + 1]);
    }
    *out = a + b;
}

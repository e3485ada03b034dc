// out[lane] = sum_i w[i][lane] . x[i], i < 64: does dot4 (WIDTH 4) or dot2 (WIDTH 2) work here? Run in a child process only.
// w  uchar or bfloat16 [64][16][WIDTH]     x  char or bfloat16 [64][WIDTH]     out  int or float [16]
// One work-item. Build: WIDTH, DOT (cpu/dot4.cl, cpu/dot2.cl).
#if !defined(WIDTH) || !defined(DOT)
#error "cpu/dot_probe.cl needs the build constants WIDTH, DOT"
#endif
#if WIDTH == 4
#define DOT_LARGEST 255
#include "cpu/dot4.cl"
inline int16 sum_of_4(int16 sum, const uint16 w, const int x) {
    short32 pairs;
    add4(&sum, &pairs, w, x, 0, 1);
    const char4 numbers = as_char4(x);
    return DOT_IS_SIGNED ? sum + 128 * (numbers.x + numbers.y + numbers.z + numbers.w) : sum;
}
#define DOT_OF_LANES sum_of_4
typedef int16 sums_t;
#else
#include "cpu/dot2.cl"
#define DOT_OF_LANES dot2
typedef float16 sums_t;
#endif

__kernel void dot_probe(__global const uint16* w, __global const int* x, __global sums_t* out) {
    sums_t a = 0, b = 0;
    for (int i = 0; i < 64; i += 2) {
        a = DOT_OF_LANES(a, w[i], x[i]);
        b = DOT_OF_LANES(b, w[i + 1], x[i + 1]);
    }
    *out = a + b;
}

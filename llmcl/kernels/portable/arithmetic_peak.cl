// Multiply-adds in registers: measures the arithmetic ceiling for prefill.
//
//   result[i] = sum over CHAINS c of x_c after ROUNDS times x_c = x_c * factor + addend, x_c starting at i + c
//
// result  float [global size]      factor, addend: arguments, so the compiler cannot precompute
// Every work-item keeps CHAINS independent sums, so no multiply-add waits for the previous result. With WIDTH 16 a sum is a vector with
// 16 equal lanes (CPU), with WIDTH 1 a number (GPU). Operations: 2 WIDTH CHAINS ROUNDS per work-item.
//
// Build: WIDTH (1 or 16), CHAINS, ROUNDS. Any one-dimensional index space.
#if !defined(WIDTH) || !defined(CHAINS) || !defined(ROUNDS)
#error "arithmetic_peak.cl needs the build constants WIDTH, CHAINS, ROUNDS"
#endif

#if WIDTH == 16
typedef float16 number;
#define LANE(x) (x).s0
#else
typedef float number;
#define LANE(x) (x)
#endif

__kernel void arithmetic_peak(__global float* result, const float factor, const float addend) {
    number x[CHAINS];
    for (int c = 0; c < CHAINS; ++c) x[c] = (number)((float)get_global_id(0) + c);
    const number a = (number)factor, b = (number)addend;
    for (int i = 0; i < ROUNDS; ++i) {
#pragma unroll
        for (int c = 0; c < CHAINS; ++c) x[c] = x[c] * a + b;
    }
    float sum = 0.0f;
    for (int c = 0; c < CHAINS; ++c) sum += LANE(x[c]);
    result[get_global_id(0)] = sum;
}

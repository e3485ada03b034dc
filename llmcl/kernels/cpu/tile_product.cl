// 16 rows of a tile of any storage type times a token, on a CPU: DOT_TILE(tile), with x and norm of the kernel at hand.
//
// With quantised weights a kernel declares `activations activated` and calls activate(x, norm, &activated) before; the norm's
// scale is a factor of the sums.
// After common/tiles.cl. Build: WEIGHT, K, NORM, with NORM EPS, DOT with quantised weights (cpu/quant_tile.cl).
#if QUANTIZED
#include "cpu/quant_tile.cl"

#define DOT_TILE(w) dot_quant_tile(w, &activated)

// The activations are rounded (or summed) once and serve all tiles.
inline void activate(__global const float* x, __global const float* norm, activations* activated) {
    for (int g = 0; g < K / 32; ++g, x += 32, norm += 32) {
        float16 lo = load16_f32(x), hi = load16_f32(x + 16);
#if NORM
        lo *= load16_f32(norm);
        hi *= load16_f32(norm + 16);
#endif
        set_group(activated, g, lo, hi);
    }
}
#else
#define DOT_TILE(w) dot_tile(w, x, norm)

inline float16 dot_tile(__global const CAT(WEIGHT, _t)* w, __global const float* x, __global const float* norm) {
    // Four sums hide the latency of the multiply-add.
    float16 a = 0, b = 0, c = 0, d = 0;
    for (int k = 0; k < K; k += 4, w += 64) {
#if NORM
        const float4 v = vload4(0, x + k) * vload4(0, norm + k);
#else
        const float4 v = vload4(0, x + k);
#endif
        a += CAT(load16_, WEIGHT)(w) * v.x;
        b += CAT(load16_, WEIGHT)(w + 16) * v.y;
        c += CAT(load16_, WEIGHT)(w + 32) * v.z;
        d += CAT(load16_, WEIGHT)(w + 48) * v.w;
    }
    return (a + b) + (c + d);
}
#endif

// The factor of the norm of x, 1 without one.
inline float scale_of_norm(__global const float* x) {
#if NORM
    float16 squares = 0;
    for (int i = 0; i < K; i += 16) squares += load16_f32(x + i) * load16_f32(x + i);
    const float sum = sum16(squares);
    return 1.0f / sqrt(NO_OVERFLOW(sum) / K + EPS);
#else
    return 1.0f;
#endif
}

// Multiplies 16 rows of a tile, in any storage type, by a token on a CPU: DOT_TILE(tile), with the kernel's x and norm.
//
// With quantised weights a kernel first declares `activations activated` and calls activate(x, norm, &activated); the norm's
// scale multiplies the sums.
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
    // Four sums hide the multiply-add latency.
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

// The factor for normalising x, 1 without NORM.
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

// Loads a row of activations for a product, normalised or not. After common/common.cl. Build: NORM, EPS.
inline float row_scale(__global const float* x, const int columns) {
#if NORM
    float16 squares = 0;
    for (int k = 0; k < columns; k += 16) squares += load16_f32(x + k) * load16_f32(x + k);
    const float sum = sum16(squares);
    return 1.0f / sqrt(NO_OVERFLOW(sum) / columns + EPS);
#else
    return 1.0f;
#endif
}

inline float16 load_row(__global const float* x, __global const float* norm, const int k) {
#if NORM
    return load16_f32(x + k) * load16_f32(norm + k);
#else
    return load16_f32(x + k);
#endif
}

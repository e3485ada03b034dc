// x[t] = gelu(x[t] + bias), in place, with gelu(v) = v (1 + erf(v / sqrt(2))) / 2   (Hendrycks and Gimpel, "GELUs", 2016)
//
// With TANH, gelu(v) = v (1 + tanh(sqrt(2 / pi) (v + 0.044715 v^3))) / 2.
//
// x  float [n][COLUMNS]      bias  float [COLUMNS]
// Index space: groups (ceil(COLUMNS / LOCAL_SIZE), n), local size LOCAL_SIZE; a work-item per value.
// Build: COLUMNS, TANH (0 or 1), LOCAL_SIZE. Within 1e-6 of float64 relative to the largest value.
#if !defined(COLUMNS) || !defined(TANH) || !defined(LOCAL_SIZE)
#error "bias_gelu.cl needs the build constants COLUMNS, TANH, LOCAL_SIZE"
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void bias_gelu(__global float* x, __global const float* bias) {
    const int column = get_global_id(0);
    if (column >= COLUMNS) return;
    x += (size_t)get_group_id(1) * COLUMNS;
    const float v = x[column] + bias[column];
#if TANH
    x[column] = 0.5f * v * (1.0f + tanh(0.7978845608f * (v + 0.044715f * v * v * v)));
#else
    x[column] = 0.5f * v * (1.0f + erf(v * 0.70710678118f));
#endif
}

// Prepares a step's activations for float32 products (cpu/token_product.cl), in the format cpu/tile_product.cl uses for a token.
//
//   rows[t] = x[t] norm | sums of 32-column groups | scale    scale = 1/sqrt(mean(x[t]^2) + EPS) with NORM, else 1 and no norm
//
// x  float [n ROWS][k]     norm  float [k], with NORM     rows  float [n ROWS][ROW_FLOATS(k)]
// Index space: (rows, column parts), local size 1.
// k: a multiple of 16; sums exist only with a multiple of 32. Build: NORM, EPS, ROWS per token.
#if !defined(NORM) || !defined(EPS) || !defined(ROWS) || !defined(STATE_N_TOKENS)
#error "cpu/norm_activations.cl needs the build constants NORM, EPS, ROWS and those of the step state"
#endif
#include "common/common.cl"
#include "cpu/norm_row.cl"
#include "cpu/activation_row.cl"

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void norm_activations(__global const float* x, __global const float* norm, __global float* rows, __global const int* state,
                      const int k) {
    const int t = get_group_id(0), part = get_group_id(1), parts = get_num_groups(1);
    if (t >= state[STATE_N_TOKENS] * ROWS) return;
    x += (size_t)t * k;
    rows += (size_t)t * ROW_FLOATS(k);
    for (int i = k / 16 * part / parts; i < k / 16 * (part + 1) / parts; ++i)
        store16_f32(load_row(x, norm, 16 * i), rows + 16 * i);
    for (int g = k / 32 * part / parts; g < k / 32 * (part + 1) / parts; ++g) {
        const float16 lo = load_row(x, norm, 32 * g), hi = load_row(x, norm, 32 * g + 16);
        rows[k + g] = sum16(lo + hi);
    }
    if (part == 0) rows[SCALE_AT(k)] = row_scale(x, k);
}

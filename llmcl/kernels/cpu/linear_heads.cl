// Multiplies each head's numbers by the head's matrix, on a CPU: one work-item streams a run of tiles.
//
//   out[t][h][r] = sum_k W[h][r][k] x[t][h][k]
//
// weight  tiles (tiles.cl) for all heads, N rows each, in head order, from first_tile on                   state  see STATE_*
// x       float [n][N_HEADS][X_STRIDE], used: the first K               out  float [n][N_HEADS][N]
//
// Index space: (number of streams, n / TOKENS), local size 1; stream g of G takes the tiles from n_tiles g / G on. A head's tiles stay in
// the cache for TOKENS tokens.
// Build: WEIGHT, K, N, X_STRIDE (multiples of 16), N_HEADS, TOKENS; with quantised weights DOT (cpu/quant_tile.cl). Sums in float32.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(X_STRIDE) || !defined(N_HEADS) || !defined(TOKENS) || \
    !defined(STATE_N_TOKENS)
#error "cpu/linear_heads.cl needs the build constants WEIGHT, K, N, X_STRIDE, N_HEADS, TOKENS and those of the step state"
#endif
#define NORM 0
#include "common/tiles.cl"
#include "cpu/tile_product.cl"

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void linear_heads(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global float* out,
                  __global const int* state, const int first_tile, const int n_tiles) {
    const int of_head = N / 16, group = get_group_id(0), groups = get_num_groups(0);
    const int first = first_tile + (int)((long)n_tiles * group / groups);
    const int end = first_tile + (int)((long)n_tiles * (group + 1) / groups);
    const int t0 = get_group_id(1) * TOKENS, t1 = min(t0 + TOKENS, state[STATE_N_TOKENS]);
    for (int tile = first; tile < end;) {
        const int h = tile / of_head, last = min(end, (h + 1) * of_head);
        for (int t = t0; t < t1; ++t) {
            const size_t row = (size_t)t * N_HEADS + h;
            __global const float* of_row = x + row * X_STRIDE;
#if QUANTIZED
            activations activated;
            activate(of_row, of_row, &activated);
#endif
            for (int i = tile; i < last; ++i) {
                __global const CAT(WEIGHT, _t)* w = weight + (size_t)(i - first_tile) * TILE_SIZE;
#if QUANTIZED
                const float16 y = dot_quant_tile(w, &activated);
#else
                const float16 y = dot_tile(w, of_row, of_row);
#endif
                store16_f32(y, out + row * N + (i - h * of_head) * 16);
            }
        }
        tile = last;
    }
}

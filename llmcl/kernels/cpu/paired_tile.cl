// Scores and values with bfloat16 dot products in attention on a CPU: what attention_tile.cl asks for with KV bf16x2.
//
//   s[r][key] = sum over pairs of dimensions: q[r][d, d+1] . k[key][d, d+1]
//   acc[r][column] += sum over pairs of keys: p[r][j, j+1] . v[j, j+1][column]
//
// cpu/pair_cache.cl has rounded keys and values; queries are rounded here, once, and a step's weights once a step. The sums of
// weights that normalise the output are those of the weights before they are rounded.
//
// Build: those of attention_tile.cl, DOT of cpu/dot2.cl.
#if !defined(DOT)
#error "cpu/paired_tile.cl needs the build constant DOT"
#endif
#include "cpu/dot2.cl"

#define load_pairs(at) (*(__global const uint16*)(at))

inline void round_queries(attention_state* state) {
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c)
            state->q2[r][c] = CONVERT16(round16_bf16(state->q[r][c]) >> 16, ushort);
}

// Weights are not negative; halves are rounded up, and a NaN, which comes of rounded numbers, stays one.
inline void round_weights(attention_state* state, const float16 (*p)[KEY_TILES], const int tiles) {
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < tiles; ++t)
            state->p2[r][t] = CONVERT16((as_uint16(p[r][t]) + 0x8000u) >> 16, ushort);
}

inline void score_tiles(const attention_state* state, __global const kv_t* k, float16 (*p)[KEY_TILES],
                        const int tiles) {
    for (int r0 = 0; r0 < ROWS; r0 += SCORE_ROWS) {
        float16 s[SCORE_ROWS][KEY_TILES];
#pragma unroll
        for (int r = 0; r < SCORE_ROWS; ++r)
#pragma unroll
            for (int t = 0; t < tiles; ++t) s[r][t] = 0;
        for (int d = 0; d < HEAD_DIM / 2; ++d) {
            uint16 key[KEY_TILES];
#pragma unroll
            for (int t = 0; t < tiles; ++t) key[t] = load_pairs(k + (size_t)t * KV_TILE + d * 16);
#pragma unroll
            for (int r = 0; r < SCORE_ROWS; ++r)
#pragma unroll
                for (int t = 0; t < tiles; ++t) s[r][t] = dot2(s[r][t], key[t], ((const uint*)state->q2[r0 + r])[d]);
        }
#pragma unroll
        for (int r = 0; r < SCORE_ROWS; ++r)
#pragma unroll
            for (int t = 0; t < tiles; ++t) p[r0 + r][t] = s[r][t];
    }
}

// As in float_tile.cl. Where n_keys is odd, the weight of the last pair's second key is 0.
inline void multiply_values(const attention_state* state, __global const kv_t* v, const float16 (*p)[KEY_TILES],
                            const int r0, const int c, const int n_keys, float16 (*acc)[SLICE]) {
    for (int j = 0; 2 * j < n_keys; ++j) {
        uint16 value[SLICE];
#pragma unroll
        for (int i = 0; i < SLICE; ++i) value[i] = load_pairs(v + (size_t)j * HEAD_DIM + (c + i) * 16);
#pragma unroll
        for (int r = 0; r < VALUE_ROWS; ++r)
#pragma unroll
            for (int i = 0; i < SLICE; ++i) acc[r][i] = dot2(acc[r][i], value[i], ((const uint*)state->p2[r0 + r])[j]);
    }
}

// Scores and values of a cache of floats in attention on a CPU: what attention_tile.cl asks for with KV f32, f16 and bf16.
//
// Keys and values are widened to float32 as they are loaded; all products are float32 multiply-adds.
//
// Build: those of attention_tile.cl.
inline void round_queries(attention_state* state) {}
inline void round_weights(attention_state* state, const float16 (*p)[KEY_TILES], const int tiles) {}

// Scores of the first `tiles` (a constant) of the KEY_TILES times 16 keys.
inline void score_tiles(const attention_state* state, __global const kv_t* k, float16 (*p)[KEY_TILES],
                        const int tiles) {
    for (int r0 = 0; r0 < ROWS; r0 += SCORE_ROWS) {
        float16 s[SCORE_ROWS][KEY_TILES];
#pragma unroll
        for (int r = 0; r < SCORE_ROWS; ++r)
#pragma unroll
            for (int t = 0; t < tiles; ++t) s[r][t] = 0;
        for (int d = 0; d < HEAD_DIM; ++d) {
            float16 key[KEY_TILES];
#pragma unroll
            for (int t = 0; t < tiles; ++t) key[t] = CAT(load16_, KV)(k + ((size_t)t * HEAD_DIM + d) * 16);
#pragma unroll
            for (int r = 0; r < SCORE_ROWS; ++r)
#pragma unroll
                for (int t = 0; t < tiles; ++t) s[r][t] += key[t] * ((const float*)state->q[r0 + r])[d];
        }
#pragma unroll
        for (int r = 0; r < SCORE_ROWS; ++r)
#pragma unroll
            for (int t = 0; t < tiles; ++t) p[r0 + r][t] = s[r][t];
    }
}

// Adds to acc what the values of n_keys keys are to VALUE_ROWS rows from r0 on in the columns from 16 c on.
inline void multiply_values(const attention_state* state, __global const kv_t* v, const float16 (*p)[KEY_TILES],
                            const int r0, const int c, const int n_keys, float16 (*acc)[SLICE]) {
    for (int j = 0; j < n_keys; ++j) {
        float16 value[SLICE];
#pragma unroll
        for (int i = 0; i < SLICE; ++i) value[i] = CAT(load16_, KV)(v + (size_t)j * HEAD_DIM + (c + i) * 16);
#pragma unroll
        for (int r = 0; r < VALUE_ROWS; ++r)
#pragma unroll
            for (int i = 0; i < SLICE; ++i) acc[r][i] += value[i] * ((const float*)p[r0 + r])[j];
    }
}

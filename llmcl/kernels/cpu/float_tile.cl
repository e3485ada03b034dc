// Scores and values for attention_tile.cl on a CPU, with any KV but q8_0.
//
// Every step in a sum combines an OPERAND of 16 keys or columns with a number per row. With KV f32, f16 and bf16 an operand holds
// one key or dimension, widened to float32, for float32 multiply-adds; with bf16x2 it holds two: cpu/paired_tile.cl.
//
// Build: constants for attention_tile.cl.
#if !KV_PAIRED
#define OPERAND float16
#define NUMBER float
#define AT_ONCE 1  // dimensions per score step, keys per output step
#define LOAD_OPERAND(at) CAT(load16_, KV)(at)
#define ADD_PRODUCT(sum, operand, number) ((sum) + (operand) * (number))
#define QUERY_NUMBERS(row) state->q[row]
#define WEIGHT_NUMBERS(row) p[row]
#define WITHOUT_SECOND(operand) (operand)

inline void round_queries(attention_state* state) {}
#endif

// Adds scores to s for SCORE_ROWS rows from r0 on and the first `tiles` (a constant) of the KEY_TILES 16-key tiles.
IN_REGISTERS inline void add_scores(const attention_state* state, __global const kv_t* k, const int r0,
                                    float16 (*s)[KEY_TILES], const int tiles) {
    for (int d = 0; d < HEAD_DIM / AT_ONCE; ++d) {
        OPERAND key[KEY_TILES];
#ifdef AHEAD
        PREFETCH_ALL(state->later_k + d * AT_ONCE * BLOCK_N, AT_ONCE * BLOCK_N * sizeof(kv_t));
#endif
#pragma unroll
        for (int t = 0; t < tiles; ++t) key[t] = LOAD_OPERAND(k + (size_t)t * KV_TILE + d * 16);
#pragma unroll
        for (int r = 0; r < SCORE_ROWS; ++r)
#pragma unroll
            for (int t = 0; t < tiles; ++t)
                s[r][t] = ADD_PRODUCT(s[r][t], key[t], ((const NUMBER*)QUERY_NUMBERS(r0 + r))[d]);
    }
}

// Adds to acc the values of n_keys keys (a multiple of AT_ONCE), for VALUE_ROWS rows from r0 on and columns from 16 c on.
IN_REGISTERS inline void multiply_values(const attention_state* state, __global const kv_t* v,
                                         const weight_vector (*p)[KEY_TILES], const int r0, const int c,
                                         const int n_keys, float16 (*acc)[SLICE]) {
    for (int j = 0; AT_ONCE * j < n_keys; ++j) {
        OPERAND value[SLICE];
#ifdef AHEAD
        PREFETCH_ALL(state->later_v + (size_t)j * HEAD_DIM + c * 16, SLICE * 16 * sizeof(kv_t));
#endif
#pragma unroll
        for (int i = 0; i < SLICE; ++i) value[i] = LOAD_OPERAND(v + (size_t)j * HEAD_DIM + (c + i) * 16);
#pragma unroll
        for (int r = 0; r < VALUE_ROWS; ++r)
#pragma unroll
            for (int i = 0; i < SLICE; ++i)
                acc[r][i] = ADD_PRODUCT(acc[r][i], value[i], ((const NUMBER*)WEIGHT_NUMBERS(r0 + r))[j]);
    }
}

// Adds the values of keys first (a multiple of AT_ONCE) to end - 1 to one row with weights p.
inline void add_last_values(attention_state* state, __global const kv_t* v, const weight_vector* p, const int row, const int first,
                            const int end) {
    for (int j = first / AT_ONCE; AT_ONCE * j < end; ++j) {
        for (int c = 0; c < COLUMNS; ++c) {
            const OPERAND value = LOAD_OPERAND(v + (size_t)j * HEAD_DIM + c * 16);
            state->acc[row][c] = ADD_PRODUCT(state->acc[row][c], AT_ONCE * j + AT_ONCE > end ? WITHOUT_SECOND(value) : value,
                                             ((const NUMBER*)p)[j]);
        }
    }
}

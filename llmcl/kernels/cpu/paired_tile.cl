// Scores and values with bfloat16 dot products in attention on a CPU: the operands of float_tile.cl with KV bf16x2.
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

#define OPERAND uint16
#define NUMBER uint
#define AT_ONCE 2
#define LOAD_OPERAND(at) (*(__global const uint16*)(at))
#define ADD_PRODUCT(sum, operand, number) dot2(sum, operand, number)
#define QUERY_NUMBERS(row) state->q2[row]
#define WEIGHT_NUMBERS(row) state->p2[row]

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

// Scores and values with bfloat16 dot products for attention on a CPU: float_tile.cl's operands with KV bf16x2.
//
//   s[r][key] = sum over pairs of dimensions: q[r][d, d+1] . k[key][d, d+1]
//   acc[r][column] += sum over pairs of keys: p[r][j, j+1] . v[j, j+1][column]
//
// cpu/pair_cache.cl has rounded keys and values. Queries are rounded here, once; weights are rounded once per step. The output is
// normalised by the sum of the rounded weights, so a key with nearly all the weight counts in full.
//
// Build: constants for attention_tile.cl, and DOT for cpu/dot2.cl.
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
#define WEIGHT_NUMBERS(row) p[row]
#define WITHOUT_SECOND(operand) ((operand) & 0xffffu)  // in a key pair: gives the second key weight 0

inline void round_queries(attention_state* state) {
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c)
            state->q2[r][c] = narrow16(state->q[r][c]);
}

IN_REGISTERS inline void keep_weights(const float16* weights, weight_vector* p, float16* l, const int tiles) {
    float8 sum = 0;
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
        p[t] = narrow16(weights[t]);
        sum = sum2(sum, p[t]);
    }
    l->lo += sum;
}

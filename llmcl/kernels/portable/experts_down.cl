// Adds the chosen experts' outputs to each token's row on any device: a work-group computes a row tile over all its experts.
//
//   out[t][r] += sum_s weights[t][s] (sum_k W[e][r][k] x[t][s][k] (+ bias[e][r])),   e = ids[t][s]
//
// weight   tiles (tiles.cl) for experts first_expert .. first_expert + N_EXPERTS - 1, each N rows; other experts add nothing
// x    float [n][TOP_K][K]     ids  int [n][TOP_K]     weights  float [n][TOP_K]     out  float [n][N]
//
// bias  float [experts][N], with BIAS (expert_bias.cl)
//
// Index space: (N / 16, n) groups, local size LOCAL_SIZE. Work-items treat the TOP_K experts' tiles as a single tile with TOP_K K
// columns:
// portable/tile_product.cl.
// Build: WEIGHT, K, N (both multiples of 16), N_EXPERTS, TOP_K, LOCAL_SIZE, AT_ONCE, AHEAD (linear_decode.cl).
// Local memory: 4 LOCAL_SIZE (PIECE_ROWS + 1) + 8 TOP_K bytes, PIECE_ROWS 8 with 16-bit weights, else 4; less with sub-groups.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_EXPERTS) || !defined(TOP_K) || !defined(LOCAL_SIZE) || \
    !defined(AT_ONCE) || !defined(AHEAD)
#error "portable/experts_down.cl needs the build constants WEIGHT, K, N, N_EXPERTS, TOP_K, LOCAL_SIZE, AT_ONCE, AHEAD"
#endif
#define INTEL_LANES 16
#define NORM 0
#include "portable/tile_pieces.cl"
#include "common/expert_bias.cl"

#define TILES_AT_ONCE 1
#define ALL_PIECES (TOP_K * N_PIECES)

typedef struct {
    __global const CAT(WEIGHT, _t)* weight;  // the group's tile for the first expert
    __global const float* x;
    __local const int* experts;    // per slot, counted from this buffer's first expert
    __local const float* factors;  // 0 for an expert in another buffer
} operands;

inline piece piece_at(const operands* o, const int t, const int p) {
    return load_piece(o->weight + (size_t)o->experts[p / N_PIECES] * (N / 16) * TILE_SIZE, p % N_PIECES);
}
inline columns columns_at(const operands* o, const int p, float* square, const uint power) {
    const int s = p / N_PIECES;
    return scaled_columns(load_columns(o->x + (size_t)s * K, o->x, p % N_PIECES, square, power), o->factors[s]);
}
#include "portable/tile_product.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1))) REQUIRE_LANES
void experts_down(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global const int* ids,
                  __global const float* weights, __global float* out, const int first_expert BIAS_PARAM) {
    ROW_SUMS;
    __local int experts[TOP_K];
    __local float factors[TOP_K];
    const int lid = get_local_id(0), unit = get_group_id(0), token = get_group_id(1);
    for (int s = lid; s < TOP_K; s += LOCAL_SIZE) {
        const int expert = ids[token * TOP_K + s] - first_expert;
        const bool is_here = expert >= 0 && expert < N_EXPERTS;
        experts[s] = is_here ? expert : 0;
        factors[s] = is_here ? weights[token * TOP_K + s] : 0.0f;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const uint power = HIDDEN_POWER(experts[0]);
    const operands o = {weight + unit * TILE_SIZE, x + (size_t)token * TOP_K * K, experts, factors};
    float own[1][PIECE_ROWS], square;
    add_pieces(own, &o, &square, lid, power);
    float y = sum_of_rows(own[0], sums, parts, lid);
    if (lid < 16) {
#if BIAS
        for (int s = 0; s < TOP_K; ++s) y += factors[s] * bias[(size_t)ids[token * TOP_K + s] * N + unit * 16 + lid];
#endif
        out[(size_t)token * N + unit * 16 + lid] += y;
    }
}

// Computes each token's gated hidden rows for its experts on any device: a work-group per gate and up tile, like linear_decode.cl.
//
//   out[t][s][r] = GATE(gate) up,   gate, up = scale sum_k W[e][k] (x[t][k] norm[k]) (+ bias) of rows r,   e = ids[t][s]
//   scale = 1/sqrt(mean(x^2) + EPS) with NORM, else 1 and no norm
//
// With GATE_RELU2 there is no gate: out = max(up, 0)^2, and an expert has N rows (no BIAS).
//
// weight  tiles (tiles.cl) for experts first_expert .. first_expert + N_EXPERTS - 1, each 2 N rows, gate and up in turn
// x    float [n][K]     norm  float [K]     ids  int [n][TOP_K]     out  float [n][TOP_K][N]; unchanged for other experts
//
// bias    float [experts][2][N], with BIAS: gate, up (expert_bias.cl)
//
// Index space: (N / 16, n TOP_K) groups, local size LOCAL_SIZE. How the work-items share the tiles: portable/tile_product.cl.
// Build: WEIGHT, K, N (both multiples of 16), N_EXPERTS, TOP_K, GATE, NORM, EPS, LOCAL_SIZE, AT_ONCE, AHEAD (linear_decode.cl).
// Local memory: 4 LOCAL_SIZE (PIECE_ROWS + 2) bytes, PIECE_ROWS 8 with 16-bit weights, else 4; less with sub-groups.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_EXPERTS) || !defined(TOP_K) || !defined(GATE) || \
    !defined(NORM) || !defined(EPS) || !defined(LOCAL_SIZE) || !defined(AT_ONCE) || !defined(AHEAD)
#error "portable/experts_gate_up.cl needs the build constants WEIGHT, K, N, N_EXPERTS, TOP_K, GATE, NORM, EPS, LOCAL_SIZE, AT_ONCE, AHEAD"
#endif
#define INTEL_LANES 16
#include "portable/tile_pieces.cl"
#include "common/expert_bias.cl"

#define TILES_AT_ONCE (GATE == GATE_RELU2 ? 1 : 2)
#define ALL_PIECES N_PIECES

typedef struct {
    __global const CAT(WEIGHT, _t)* tile;
    __global const float *x, *norm;
} operands;

inline piece piece_at(const operands* o, const int t, const int p) { return load_piece(o->tile + t * TILE_SIZE, p); }
inline columns columns_at(const operands* o, const int p, float* square, const uint power) {
    return load_columns(o->x, o->norm, p, square, power);
}
#include "portable/tile_product.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1))) REQUIRE_LANES
void experts_gate_up(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global const float* norm,
                     __global const int* ids, __global float* out, const int first_expert BIAS_PARAM) {
    ROW_SUMS;
    const int lid = get_local_id(0), unit = get_group_id(0), row = get_group_id(1);
    const int expert = ids[row] - first_expert;
    if (expert < 0 || expert >= N_EXPERTS) return;
    const uint power = HIDDEN_POWER(expert);
    const operands o = {weight + ((size_t)expert * (N / 16) + unit) * TILES_AT_ONCE * TILE_SIZE, x + (size_t)(row / TOP_K) * K, norm};
    float own[TILES_AT_ONCE][PIECE_ROWS], square;
    add_pieces(own, &o, &square, lid, power);
#if NORM
    NORM_SUMS;
    const float scale = scale_of_norm(square, parts, squares, lid);
#else
    const float scale = 1.0f;
#endif
    float gate = sum_of_rows(own[0], sums, parts, lid) * scale;
#if GATE == GATE_RELU2
    if (lid < 16) out[(size_t)row * N + unit * 16 + lid] = SQUARED_RELU(gate, float);
#else
    float up = sum_of_rows(own[1], sums, parts, lid) * scale;
    if (lid < 16) {
#if BIAS
        bias += (size_t)ids[row] * 2 * N + unit * 16 + lid;
        gate += bias[0];
        up += bias[N];
#endif
        out[(size_t)row * N + unit * 16 + lid] = APPLY_GATE(gate, up, exp, float);
    }
#endif
}

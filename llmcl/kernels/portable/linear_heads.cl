// Multiplies each head's numbers by the head's matrix, on any device: a work-group per row tile.
// Formula and arguments as in cpu/linear_heads.cl.
//
// Index space: (n_tiles, n / TOKENS) groups, local size LOCAL_SIZE. How the work-items share a tile: portable/tile_product.cl.
// Build: WEIGHT, K, N, X_STRIDE (multiples of 16), N_HEADS, TOKENS, LOCAL_SIZE, AT_ONCE, AHEAD (linear_decode.cl).
// Local memory: 4 LOCAL_SIZE (PIECE_ROWS + 1) bytes, PIECE_ROWS 8 with 16-bit weights, else 4; less with sub-groups.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(X_STRIDE) || !defined(N_HEADS) || !defined(TOKENS) || \
    !defined(LOCAL_SIZE) || !defined(AT_ONCE) || !defined(AHEAD) || !defined(STATE_N_TOKENS)
#error "portable/linear_heads.cl needs the build constants WEIGHT, K, N, X_STRIDE, N_HEADS, TOKENS, LOCAL_SIZE, AT_ONCE, AHEAD and those of the step state"
#endif
#define INTEL_LANES 16
#define NORM 0
// Otherwise Intel's compiler unrolls a few turns and keeps the pieces in memory.
#define ONE_TURN_AT_ONCE (SUB_GROUP == 1 && QUANTIZED)
#include "portable/tile_pieces.cl"

#define TILES_AT_ONCE 1
#define ALL_PIECES N_PIECES

typedef struct {
    __global const CAT(WEIGHT, _t)* tile;
    __global const float* x;
} operands;

inline piece piece_at(const operands* o, const int t, const int p) { return load_piece(o->tile, p); }
inline columns columns_at(const operands* o, const int p, float* square, const uint power) {
    return load_columns(o->x, o->x, p, square, power);
}
#include "portable/tile_product.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1))) REQUIRE_LANES
void linear_heads(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global float* out,
                  __global const int* state, const int first_tile, const int n_tiles) {
    ROW_SUMS;
    const int lid = get_local_id(0), unit = get_group_id(0), tile = first_tile + unit;
    const int h = tile / (N / 16), first_row = tile % (N / 16) * 16;
    const int t0 = get_group_id(1) * TOKENS, t1 = min(t0 + TOKENS, state[STATE_N_TOKENS]);
    const uint power = HIDDEN_POWER(t0);
    for (int t = t0; t < t1; ++t) {
        const size_t row = (size_t)t * N_HEADS + h;
        const operands o = {weight + (size_t)unit * TILE_SIZE, x + row * X_STRIDE};
        float own[1][PIECE_ROWS], square;
        add_pieces(own, &o, &square, lid, power);
        const float y = sum_of_rows(own[0], sums, parts, lid);
        if (lid < 16) out[row * N + first_row + lid] = y;
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}

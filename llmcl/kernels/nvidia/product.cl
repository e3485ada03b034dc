// A product for one token, W x, by teams of warps: what nvidia/linear_decode.cl and nvidia/decode_layers.cl have in common.
//
// A team takes a unit, one 16-row tile or with `gated` two (gate and up), and its warps share the columns in runs of 16. A
// warp reads a run of a tile, 512 consecutive bytes, 16 a lane: 8 rows of one column, as in the portable form. The squares of
// x for the norm are summed on the way: each column is met once in a team.
//
//     lane:        0        1        2        3      ...      31        tile memory, 16 values a column k:
//     column k:    0        0        1        1               15       [ rows 0-7 | rows 8-15 ] [ rows 0-7 | ...
//     rows:       0-7     8-15      0-7     8-15             8-15
//
// Sums are the same to the bit for the same number of warps in a team.
// Build: WEIGHT (f16 or bf16), EPS, UNROLL (loads of a lane in flight), GATE where a unit is gated.
#include "common.cl"
#include "nvidia/ptx.cl"

#define RUN 16  // columns that a warp reads at once
// Local floats for the teams of a work-group of `warps` warps.
#define PRODUCT_FLOATS(warps) (2 * (warps) * 33)

inline void multiply(float acc[8], const uint4 w, const float x) {
    const uint words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 v = CAT(widen_, WEIGHT)(words[i]);
        acc[2 * i] += v.x * x;
        acc[2 * i + 1] += v.y * x;
    }
}

// The weights of UNROLL runs of a unit, on their way.
typedef struct {
    uint4 words[2][UNROLL];
} weight_turn;

#define UNIT_OFFSET(unit, columns, gated) ((size_t)(unit) * ((gated) ? 2 : 1) * (columns) * 16)

// Asks for a warp's turn that begins at column k; w is the unit's.
inline void load_turn(weight_turn* turn, __global const CAT(WEIGHT, _t)* w, const int columns, const bool gated, const int k,
                      const int stride) {
    w += get_local_id(0) % WARP * 8;
    if (k + (UNROLL - 1) * stride >= columns) return;  // dot_share takes runs one by one
#pragma unroll
    for (int t = 0; t < (gated ? 2 : 1); ++t)
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            turn->words[t][u] = stream16(w + ((size_t)t * columns + k + u * stride) * 16);
}

// Sums of a warp's share of a unit: acc[tile] of the lane's 8 rows, and the squares of its columns. at_hand: its first turn is
// in `turn` already.
inline void dot_share(__global const CAT(WEIGHT, _t)* w, __global const float* x, __global const float* norm,
                      const int columns, const bool gated, const bool normed, const int first, const int stride,
                      weight_turn* turn, bool at_hand, float acc[2][8], float* square) {
    const int tiles = gated ? 2 : 1;
    int k = first;
    for (; k + (UNROLL - 1) * stride < columns; k += UNROLL * stride, at_hand = false) {
        float v[UNROLL];
        if (!at_hand) load_turn(turn, w, columns, gated, k, stride);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            v[u] = x[k + u * stride];
            if (normed) {
                *square += v[u] * v[u];
                v[u] *= norm[k + u * stride];
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
#pragma unroll
            for (int t = 0; t < tiles; ++t) multiply(acc[t], turn->words[t][u], v[u]);
    }
    w += get_local_id(0) % WARP * 8;
    for (; k < columns; k += stride) {
        float v = x[k];
        if (normed) {
            *square += v * v;
            v *= norm[k];
        }
#pragma unroll
        for (int t = 0; t < tiles; ++t) multiply(acc[t], stream16(w + ((size_t)t * columns + k) * 16), v);
    }
}

// out = epilogue(W rms_norm(x)) for the units from first_unit on, every unit_stride-th: the share of a team of `warps` warps,
// of which this is `member`. `barrier_id` is the team's own, from 1 on. at_hand: the first turn of the first unit is in `turn`.
// rows: of the output; scratch: 66 floats a warp.
inline void product(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global const float* norm,
                    __global float* out, const int columns, const int rows, const bool gated, const bool normed,
                    const bool add, const int n_units, const int first_unit, const int unit_stride, const int warps,
                    const int member, const int barrier_id, weight_turn* turn, bool at_hand,
                    __local float* scratch) {
    const int lane = get_local_id(0) % WARP, tiles = gated ? 2 : 1;
    x += lane / 2;
    norm += lane / 2;
    int buffer = 0;  // the team's warps are at most one unit apart
    for (int unit = first_unit; unit < n_units; unit += unit_stride, buffer ^= 1) {
        float acc[2][8], square = 0.0f;
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int i = 0; i < 8; ++i) acc[t][i] = 0.0f;
        dot_share(weight + UNIT_OFFSET(unit, columns, gated), x, norm, columns, gated, normed, member * RUN, warps * RUN, turn,
                  at_hand, acc, &square);
        at_hand = false;
        __local float* sums = scratch + buffer * warps * 33;  // [warps][2][16], then the squares of each warp
#pragma unroll
        for (int t = 0; t < tiles; ++t) {
            const float sum = sum8(acc[t], lane);
            if (!(lane & 2)) sums[(member * 2 + t) * 16 + (lane & 1) * 8 + sum8_index(lane)] = sum;
        }
        if (normed) {
            square = warp_sum(square);
            if (lane == 0) sums[warps * 32 + member] = 0.5f * square;  // both parities met every column
        }
        team_barrier(barrier_id, warps * WARP);
        const int row = unit * 16 + lane;
        if (member > 0 || lane >= 16 || row >= rows) continue;
        float y[2] = {0.0f, 0.0f}, scale = 1.0f;
#pragma unroll
        for (int t = 0; t < tiles; ++t)
            for (int i = 0; i < warps; ++i) y[t] += sums[(i * 2 + t) * 16 + lane];
        if (normed) {
            float sum = 0.0f;
            for (int i = 0; i < warps; ++i) sum += sums[warps * 32 + i];
            scale = 1.0f / sqrt(sum / columns + EPS);
        }
        float value = y[0] * scale;
#ifdef GATE
        if (gated) value = GATE_VALUE(value, exp) * (y[1] * scale);
#endif
        out[row] = add ? out[row] + value : value;
    }
}

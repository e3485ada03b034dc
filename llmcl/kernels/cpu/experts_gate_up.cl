// Computes each token's gated hidden rows for its experts on a CPU: one work-item streams runs of gate and up tiles.
// Formula, arguments and build constants as in portable/experts_gate_up.cl, without LOCAL_SIZE, AT_ONCE, AHEAD; and DOT with
// quantised weights (cpu/quant_tile.cl).
//
// Index space: (number of streams, n), local size 1. The tile pairs of a token's experts form a sequence, N / 16 each;
// stream g of G starts at pair TOP_K N / 16 g / G.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_EXPERTS) || !defined(TOP_K) || !defined(GATE) || \
    !defined(NORM) || !defined(EPS)
#error "cpu/experts_gate_up.cl needs the build constants WEIGHT, K, N, N_EXPERTS, TOP_K, GATE, NORM, EPS"
#endif
#include "common/tiles.cl"
#include "common/expert_bias.cl"
#include "cpu/unit.cl"
#include "cpu/tile_product.cl"

#define UNITS (N / 16)
#define TILES_AT_ONCE (GATE == GATE_RELU2 ? 1 : 2)
#define PIECE PIECE_OF(TILES_AT_ONCE * TILE_SIZE * sizeof(CAT(WEIGHT, _t)), TOP_K * UNITS)

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void experts_gate_up(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global const float* norm,
                     __global const int* ids, __global float* out, const int first_expert BIAS_PARAM) {
    BEGIN_UNIT;
    const int first = (int)((long)(TOP_K * UNITS) * get_group_id(0) / get_num_groups(0));
    const int end = (int)((long)(TOP_K * UNITS) * (get_group_id(0) + 1) / get_num_groups(0));
    x += (size_t)get_group_id(1) * K;
    ids += (size_t)get_group_id(1) * TOP_K;
    out += (size_t)get_group_id(1) * TOP_K * N;
    const float scale = scale_of_norm(x);
#if QUANTIZED
    activations activated;
    activate(x, norm, &activated);
#endif
    for (int piece = first + PIECE * PIECES_STORED; piece < end; piece += PIECE) {
        const int n = min((int)PIECE, end - piece);
        float16 y[PIECE];
        for (int i = 0; i < n; ++i) {
            const int slot = (piece + i) / UNITS, tile = (piece + i) % UNITS, expert = ids[slot] - first_expert;
            if (expert < 0 || expert >= N_EXPERTS) continue;
            __global const CAT(WEIGHT, _t)* w = weight + ((size_t)expert * UNITS + tile) * TILES_AT_ONCE * TILE_SIZE;
#if GATE == GATE_RELU2
            const float16 hidden = DOT_TILE(w) * scale;
            y[i] = SQUARED_RELU(hidden, float16);
#else
            float16 gate = DOT_TILE(w) * scale;
            float16 up = DOT_TILE(w + TILE_SIZE) * scale;
#if BIAS
            __global const float* of_gate = bias + (size_t)(first_expert + expert) * 2 * N + tile * 16;
            gate += load16_f32(of_gate);
            up += load16_f32(of_gate + N);
#endif
            y[i] = APPLY_GATE(gate, up, exp16, float16);
#endif
        }
        if (!MAY_STORE) return;
        for (int i = 0; i < n; ++i) {
            const int expert = ids[(piece + i) / UNITS] - first_expert;
            if (expert >= 0 && expert < N_EXPERTS) store16_f32(y[i], out + (piece + i) * 16);
        }
        PIECE_STORED;
    }
}

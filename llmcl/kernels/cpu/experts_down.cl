// Adds the chosen experts' outputs to each token's row on a CPU: a work-item processes a run of tiles for all its experts.
// Formula, arguments and build constants as in portable/experts_down.cl, without LOCAL_SIZE, AT_ONCE, AHEAD; and DOT with
// quantised weights (cpu/quant_tile.cl).
//
// Index space: (work-items per token, n), local size 1; work-item g of G takes each expert's tiles from N / 16 g / G on.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_EXPERTS) || !defined(TOP_K)
#error "cpu/experts_down.cl needs the build constants WEIGHT, K, N, N_EXPERTS, TOP_K"
#endif
#define NORM 0
#include "common/tiles.cl"
#include "common/expert_bias.cl"
#include "cpu/unit.cl"
#include "cpu/tile_product.cl"

#define PIECE PIECE_OF(TOP_K * TILE_SIZE * sizeof(CAT(WEIGHT, _t)), N / 16)
#if QUANTIZED
#define DOT_SLOT(s, w) dot_quant_tile(w, &activated[s])
#else
#define DOT_SLOT(s, w) dot_tile(w, rows[s], rows[s])
#endif

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void experts_down(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global const int* ids,
                  __global const float* weights, __global float* out, const int first_expert BIAS_PARAM) {
    BEGIN_UNIT;
    const int first = (int)((long)(N / 16) * get_group_id(0) / get_num_groups(0));
    const int end = (int)((long)(N / 16) * (get_group_id(0) + 1) / get_num_groups(0));
    x += (size_t)get_group_id(1) * TOP_K * K;
    ids += (size_t)get_group_id(1) * TOP_K;
    weights += (size_t)get_group_id(1) * TOP_K;
    out += (size_t)get_group_id(1) * N;
    // The slots whose experts are in this weight.
    int n_slots = 0, experts[TOP_K];
    float factors[TOP_K];
    __global const float* rows[TOP_K];
#if QUANTIZED
    activations activated[TOP_K];
#endif
    for (int s = 0; s < TOP_K; ++s) {
        const int expert = ids[s] - first_expert;
        if (expert < 0 || expert >= N_EXPERTS) continue;
        experts[n_slots] = expert;
        factors[n_slots] = weights[s];
        rows[n_slots] = x + (size_t)s * K;
#if QUANTIZED
        activate(rows[n_slots], rows[n_slots], &activated[n_slots]);
#endif
        ++n_slots;
    }
    for (int piece = first + PIECE * PIECES_STORED; piece < end; piece += PIECE) {
        const int n = min((int)PIECE, end - piece);
        float16 y[PIECE];
        for (int i = 0; i < n; ++i) {
            const int tile = piece + i;
            y[i] = load16_f32(out + tile * 16);
            for (int s = 0; s < n_slots; ++s) {
                float16 of_slot = DOT_SLOT(s, weight + ((size_t)experts[s] * (N / 16) + tile) * TILE_SIZE);
#if BIAS
                of_slot += load16_f32(bias + (size_t)(first_expert + experts[s]) * N + tile * 16);
#endif
                y[i] += of_slot * factors[s];
            }
        }
        if (!MAY_STORE) return;
        for (int i = 0; i < n; ++i) store16_f32(y[i], out + (piece + i) * 16);
        PIECE_STORED;
    }
}

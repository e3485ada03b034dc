// The outputs of the chosen experts, added to each token's row on a CPU: one work-item streams a run of tiles of each expert.
// Formula, arguments and build constants as in portable/experts_down.cl, but for LOCAL_SIZE, AT_ONCE, AHEAD; and DOT with
// quantised weights (cpu/quant_tile.cl).
//
// Index space: (number of streams, n), local size 1; stream g of G takes the tiles N / 16 g / G and on of each expert.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_EXPERTS) || !defined(TOP_K)
#error "cpu/experts_down.cl needs the build constants WEIGHT, K, N, N_EXPERTS, TOP_K"
#endif
#define NORM 0
#include "common/tiles.cl"
#include "common/expert_bias.cl"
#include "cpu/tile_product.cl"

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void experts_down(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global const int* ids,
                  __global const float* weights, __global float* out, const int first_expert BIAS_PARAM) {
    const int first = (int)((long)(N / 16) * get_group_id(0) / get_num_groups(0));
    const int end = (int)((long)(N / 16) * (get_group_id(0) + 1) / get_num_groups(0));
    __global const float* norm = x;  // not read
    x += (size_t)get_group_id(1) * TOP_K * K;
    ids += (size_t)get_group_id(1) * TOP_K;
    weights += (size_t)get_group_id(1) * TOP_K;
    out += (size_t)get_group_id(1) * N;
    for (int s = 0; s < TOP_K; ++s, x += K) {
        const int expert = ids[s] - first_expert;
        if (expert < 0 || expert >= N_EXPERTS) continue;
        const float factor = weights[s];
#if QUANTIZED
        activations activated;
        activate(x, norm, &activated);
#endif
        for (int unit = first; unit < end; ++unit) {
            __global const CAT(WEIGHT, _t)* w = weight + ((size_t)expert * (N / 16) + unit) * TILE_SIZE;
            float16 y = DOT_TILE(w);
#if BIAS
            y += load16_f32(bias + (size_t)ids[s] * N + unit * 16);
#endif
            store16_f32(load16_f32(out + unit * 16) + y * factor, out + unit * 16);
        }
    }
}

// Merges online-softmax states for nvidia/attend.cl, using its macros and types: the states of a group's warps, and the weights of
// the split states.

// The merged state of a group's warps, for element i in [GROUP_SIZE][HEAD_DIM].
typedef struct {
    float m, l, acc;
} softmax_state;

// Called by whole warps, with elements from a single query.
inline softmax_state warps_state(const kv_split* s, const int i, const attend_space* space) {
    // The remaining warps have no keys.
    const int n_warps = max(1, min(ATTEND_WARPS, (s->end - s->first + KEY_TILE - 1) / KEY_TILE));
    const int lane = i % WARP, g = i / HEAD_DIM;
    __local const float* m = space->warps + min(lane, n_warps - 1) * space->stride + GROUP_SIZE * HEAD_DIM + g;
    softmax_state all = {warp_max(*m), 0.0f, 0.0f};
    const float weight = lane < n_warps ? softmax_weight(*m, all.m) : 0.0f;  // for warp `lane`
    all.l = warp_sum(weight * m[GROUP_SIZE]);
#pragma unroll 4
    for (int w = 0; w < n_warps; ++w) all.acc += shuffle_from(weight, w) * space->warps[w * space->stride + i];
    return all;
}

// ml: m and l [n_splits][GROUP_SIZE][2] of the splits; m is replaced by the weight of a split's accumulator. Called by all
// work-items.
inline void weigh_splits(__local float* ml, const int n_splits) {
    const int lane = (int)get_local_id(0) % WARP;
    for (int g = (int)get_local_id(0) / WARP; g < GROUP_SIZE; g += WARPS) {
        __local float* of = ml + 2 * g;
        float top = -INFINITY, whole = 0.0f;
        for (int k = lane; k < n_splits; k += WARP) top = fmax(top, of[k * 2 * GROUP_SIZE]);
        top = warp_max(top);
        for (int k = lane; k < n_splits; k += WARP)
            whole += softmax_weight(of[k * 2 * GROUP_SIZE], top) * of[k * 2 * GROUP_SIZE + 1];
        const float norm = softmax_norm(warp_sum(whole));
        for (int k = lane; k < n_splits; k += WARP)
            of[k * 2 * GROUP_SIZE] = softmax_weight(of[k * 2 * GROUP_SIZE], top) * norm;
    }
}

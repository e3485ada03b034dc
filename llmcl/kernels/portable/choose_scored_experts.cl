// Picks each token's TOP_K experts by score, within the best expert groups, and their output weights.
//
//   s_e = sigmoid(logits[t][e]) with SIGMOID, else softmax(logits[t])_e          c_e = s_e + correction_e with CORRECTION, else s_e
//   groups of N_EXPERTS / N_GROUPS neighbours; the TOP_GROUPS with the largest sums of their PER_GROUP largest c
//   ids[t] = the experts in these groups by descending c, lower number first on ties
//   weights[t][i] = SCALE s_ids[i] (/ (sum_i s_ids[i] + 1e-20) with RENORMALIZE)
//   (DeepSeek-AI, "DeepSeek-V2", 2024, 2.2, and "DeepSeek-V3 Technical Report", 2024, 2.1.2)
//
// logits  float [n][N_EXPERTS]     correction  float [N_EXPERTS]     ids  int [n][TOP_K]     weights  float [n][TOP_K]
//
// Index space: a work-group per token, local size LOCAL_SIZE; work-items share groups, then experts. A rank is the number of groups or
// experts before it. Scores are compared by bits, a total order even with NaN, so every id is valid.
// Build: N_EXPERTS, TOP_K (at most the experts in TOP_GROUPS groups), SIGMOID, N_GROUPS (divides N_EXPERTS), TOP_GROUPS, PER_GROUP (1
// or 2, at most
// the group size), RENORMALIZE, SCALE, CORRECTION, LOCAL_SIZE (a power of two).
// Local memory: 4 (2 N_EXPERTS + 2 N_GROUPS + TOP_K + LOCAL_SIZE) bytes, none with a LOCAL_SIZE of 1.
#if !defined(N_EXPERTS) || !defined(TOP_K) || !defined(SIGMOID) || !defined(N_GROUPS) || !defined(TOP_GROUPS) || \
    !defined(PER_GROUP) || !defined(RENORMALIZE) || !defined(SCALE) || !defined(CORRECTION) || !defined(LOCAL_SIZE)
#error "choose_scored_experts.cl needs N_EXPERTS, TOP_K, SIGMOID, N_GROUPS, TOP_GROUPS, PER_GROUP, RENORMALIZE, SCALE, CORRECTION, LOCAL_SIZE"
#endif
#include "common/common.cl"
#include "common/float_order.cl"
#include "common/group_memory.cl"
#include "common/reduce.cl"

#define OF_A_GROUP (N_EXPERTS / N_GROUPS)
#if CORRECTION
#define CORRECTED(i) (scores[i] + correction[i])
#else
#define CORRECTED(i) scores[i]
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void choose_scored_experts(__global const float* logits, __global const float* correction, __global int* ids,
                           __global float* weights) {
    OF_GROUP float scores[N_EXPERTS];
    OF_GROUP uint orders[N_EXPERTS];
    OF_GROUP uint group_orders[N_GROUPS];
    OF_GROUP int is_kept[N_GROUPS];
    OF_GROUP float chosen[TOP_K];
    LOCAL_SCRATCH(float, scratch);
    const int lid = get_local_id(0);
    logits += (size_t)get_group_id(0) * N_EXPERTS;
    ids += (size_t)get_group_id(0) * TOP_K;
    weights += (size_t)get_group_id(0) * TOP_K;
#if SIGMOID
    for (int i = lid; i < N_EXPERTS; i += LOCAL_SIZE) scores[i] = 1.0f / (1.0f + exp(-logits[i]));
#else
    float top = -INFINITY, sum = 0.0f;
    for (int i = lid; i < N_EXPERTS; i += LOCAL_SIZE) top = fmax(top, logits[i]);
    top = reduce_max(top, scratch, lid);
    for (int i = lid; i < N_EXPERTS; i += LOCAL_SIZE) sum += exp(logits[i] - top);
    sum = reduce_sum(sum, scratch, lid);
    for (int i = lid; i < N_EXPERTS; i += LOCAL_SIZE) scores[i] = exp(logits[i] - top) / sum;
#endif
    for (int i = lid; i < N_EXPERTS; i += LOCAL_SIZE) orders[i] = order_of(CORRECTED(i));
    WAIT;
    for (int g = lid; g < N_GROUPS; g += LOCAL_SIZE) {
        int best = g * OF_A_GROUP, second = -1;
        for (int i = best + 1; i < (g + 1) * OF_A_GROUP; ++i) {
            if (orders[i] > orders[best]) {
                second = best;
                best = i;
            } else if (second < 0 || orders[i] > orders[second]) {
                second = i;
            }
        }
        group_orders[g] = order_of(PER_GROUP == 2 ? CORRECTED(best) + CORRECTED(second) : CORRECTED(best));
    }
    WAIT;
    for (int g = lid; g < N_GROUPS; g += LOCAL_SIZE) {
        int place = 0;
        for (int j = 0; j < N_GROUPS; ++j)
            place += group_orders[j] > group_orders[g] || (group_orders[j] == group_orders[g] && j < g);
        is_kept[g] = place < TOP_GROUPS;
    }
    WAIT;
    for (int i = lid; i < N_EXPERTS; i += LOCAL_SIZE) {
        if (!is_kept[i / OF_A_GROUP]) continue;
        const uint order = orders[i];
        int place = 0;
        for (int j = 0; j < N_EXPERTS; ++j)
            place += is_kept[j / OF_A_GROUP] && (orders[j] > order || (orders[j] == order && j < i));
        if (place < TOP_K) {
            ids[place] = i;
            chosen[place] = scores[i];
        }
    }
    WAIT;
    float factor = SCALE;
#if RENORMALIZE
    float of_chosen = 1e-20f;
    for (int s = 0; s < TOP_K; ++s) of_chosen += chosen[s];
    factor /= of_chosen;
#endif
    for (int s = lid; s < TOP_K; s += LOCAL_SIZE) weights[s] = chosen[s] * factor;
}

// Picks each token's TOP_K experts with the largest logits, and their output weights (Shazeer et al., 2017).
//
//   l = logits[t] (+ bias)
//   ids[t] = the experts by descending l, lower number first on ties
//   weights[t][s] = exp(l[ids[t][s]]) / sum_e exp(l[e])       e: the chosen experts with RENORMALIZE, else all
//
// logits  float [n][ROW], the first N_EXPERTS used     bias  float [N_EXPERTS], with BIAS (expert_bias.cl)     ids  int [n][TOP_K]
// weights  float [n][TOP_K]
//
// Index space: a work-group per token, local size LOCAL_SIZE. A work-item takes the experts i, i + LOCAL_SIZE, ... An expert's rank is
// the number of experts before it. Logits are compared by bits, a total order even with NaN. All ranks therefore differ, and every id is
// valid whatever the logits are. NaN logits give NaN weights.
// Build: N_EXPERTS, ROW, TOP_K (at most N_EXPERTS), RENORMALIZE, LOCAL_SIZE (a power of two).
// Local memory: 4 (N_EXPERTS + TOP_K + LOCAL_SIZE) bytes, none with a LOCAL_SIZE of 1.
#if !defined(N_EXPERTS) || !defined(ROW) || !defined(TOP_K) || !defined(RENORMALIZE) || !defined(LOCAL_SIZE)
#error "choose_experts.cl needs the build constants N_EXPERTS, ROW, TOP_K, RENORMALIZE, LOCAL_SIZE"
#endif
#include "common/common.cl"
#include "common/expert_bias.cl"
#include "common/float_order.cl"
#include "common/group_memory.cl"
#include "common/reduce.cl"

#if BIAS
#define LOGIT(i) (logits[i] + bias[i])
#else
#define LOGIT(i) logits[i]
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void choose_experts(__global const float* logits, __global int* ids, __global float* weights BIAS_PARAM) {
    OF_GROUP uint orders[N_EXPERTS];
    OF_GROUP float chosen[TOP_K];
    LOCAL_SCRATCH(float, scratch);
    const int lid = get_local_id(0);
    logits += (size_t)get_group_id(0) * ROW;
    ids += (size_t)get_group_id(0) * TOP_K;
    weights += (size_t)get_group_id(0) * TOP_K;
    for (int i = lid; i < N_EXPERTS; i += LOCAL_SIZE) orders[i] = order_of(LOGIT(i));
    WAIT;
    for (int i = lid; i < N_EXPERTS; i += LOCAL_SIZE) {
        const uint order = orders[i];
        int place = 0;
        for (int j = 0; j < N_EXPERTS; ++j) place += orders[j] > order || (orders[j] == order && j < i);
        if (place < TOP_K) {
            ids[place] = i;
            chosen[place] = LOGIT(i);
        }
    }
    WAIT;
    const float largest = chosen[0];
    float sum = 0.0f;
#if RENORMALIZE
    for (int s = 0; s < TOP_K; ++s) sum += exp(chosen[s] - largest);
#else
    for (int i = lid; i < N_EXPERTS; i += LOCAL_SIZE) sum += exp(LOGIT(i) - largest);
    sum = reduce_sum(sum, scratch, lid);
#endif
    for (int s = lid; s < TOP_K; s += LOCAL_SIZE) weights[s] = exp(chosen[s] - largest) / sum;
}

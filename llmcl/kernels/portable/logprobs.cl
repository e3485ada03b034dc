// Log-probabilities of the chosen token and the most likely tokens, for each row in a step (step_rows.cl) that requests them.
//
//   log p_i = l_i - log sum_j exp(l_j)    with the model's raw logits, without temperature, penalty or bias
//
// logprobs_partial   a group's largest logit, sum of exp(l - largest), and its `wanted` largest (logit, token)
// logprobs_merge     joins the groups: the row's log sum exp into out[0], the largest into out[1 ..]
// logprobs_chosen    after the choice: out[0] = (the token's log p, the token)
//
// On ties the lower token comes first. NaN logits are left out; a place without a token has token -1.
//
// logits   float [n][VOCAB]     wanted  int per sequence: alternatives, at most MAX_TOP; negative: none requested
// sums     float2 [n][N_GROUPS]    tops  float2 [n][N_GROUPS][MAX_TOP]: (logit, token bits)
// out      float2 [LINES][N_SEQUENCES][1 + MAX_TOP]: (log-probability, token bits), by step number
// rules, biases  as in logit_bias.cl: the amount added to the chosen logit in between
// Index space: N_GROUPS groups per row, local size LOCAL_SIZE; one group for merge and chosen.
// Build: VOCAB, MAX_TOP, MAX_BIASES, LINES, N_SEQUENCES, N_GROUPS, LOCAL_SIZE (a power of two), step state constants.
#if !defined(VOCAB) || !defined(MAX_TOP) || !defined(MAX_BIASES) || !defined(LINES) || !defined(N_SEQUENCES) || \
    !defined(N_GROUPS) || !defined(LOCAL_SIZE) || !defined(STATE_STEP)
#error "logprobs.cl needs the build constants VOCAB, MAX_TOP, MAX_BIASES, LINES, N_SEQUENCES, N_GROUPS, LOCAL_SIZE and those of the step state"
#endif
#include "common/common.cl"
#include "common/reduce.cl"
#include "common/step_rows.cl"

#define PARTITION ((VOCAB + N_GROUPS - 1) / N_GROUPS)
#define OUT_SIZE (1 + MAX_TOP)
#define OUT_OF(step, row) (((step) % LINES * N_SEQUENCES + (row)) * OUT_SIZE)

// Whether (logit, token) a comes before b; `none` comes last.
inline bool is_before(const float2 a, const float2 b) {
    return a.x > b.x || (a.x == b.x && (uint)as_int(a.y) < (uint)as_int(b.y));
}
inline float2 first_of(const float2 a, const float2 b) { return is_before(a, b) ? a : b; }
inline float2 reduce_first(const float2 v, __local float2* scratch, const int lid) REDUCED(float2, first_of)
#define NONE ((float2)(-INFINITY, as_float(-1)))

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void logprobs_partial(__global const float* logits, __global const int* state, __global const int* wanted,
                      __global float2* sums, __global float2* tops) {
    LOCAL_SCRATCH(float2, scratch);
    LOCAL_SCRATCH(float, numbers);
    const int lid = get_local_id(0), group = get_group_id(0), row = step_row(1);
    const int begin = min(VOCAB, group * PARTITION), end = min(VOCAB, begin + PARTITION);
    const int n = wanted[sequence_of(state, row)];
    if (n < 0) return;
    logits += (size_t)row * VOCAB;
    tops += (row * N_GROUPS + group) * MAX_TOP;
    float top = -INFINITY;
    for (int i = begin + lid; i < end; i += LOCAL_SIZE) top = fmax(top, logits[i]);
    top = reduce_max(top, numbers, lid);
    float sum = 0.0f;
    for (int i = begin + lid; i < end; i += LOCAL_SIZE)
        if (logits[i] > -INFINITY) sum += exp(logits[i] - top);
    sum = reduce_sum(sum, numbers, lid);
    if (lid == 0) sums[row * N_GROUPS + group] = (float2)(top, sum);
    float2 before = (float2)(INFINITY, as_float(-1));
    for (int k = 0; k < n; ++k) {
        float2 best = NONE;
        for (int i = begin + lid; i < end; i += LOCAL_SIZE) {
            const float2 candidate = (float2)(logits[i], as_float(i));
            if (is_before(before, candidate) && is_before(candidate, best)) best = candidate;
        }
        before = reduce_first(best, scratch, lid);
        if (lid == 0) tops[k] = before;
    }
}

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void logprobs_merge(__global const int* state, __global const int* wanted, __global const float2* sums,
                    __global const float2* tops, __global float2* out) {
    LOCAL_SCRATCH(float2, scratch);
    LOCAL_SCRATCH(float, numbers);
    const int lid = get_local_id(0), row = step_row(1), n = wanted[sequence_of(state, row)];
    if (n < 0) return;
    sums += row * N_GROUPS;
    tops += row * N_GROUPS * MAX_TOP;
    out += OUT_OF(state[STATE_STEP], row);
    float top = -INFINITY;
    for (int i = lid; i < N_GROUPS; i += LOCAL_SIZE) top = fmax(top, sums[i].x);
    top = reduce_max(top, numbers, lid);
    float sum = 0.0f;
    for (int i = lid; i < N_GROUPS; i += LOCAL_SIZE)
        if (sums[i].x > -INFINITY) sum += sums[i].y * exp(sums[i].x - top);
    const float log_sum = top + log(reduce_sum(sum, numbers, lid));
    if (lid == 0) out[0] = (float2)(log_sum, as_float(-1));
    float2 before = (float2)(INFINITY, as_float(-1));
    for (int k = 0; k < n; ++k) {
        float2 best = NONE;
        for (int i = lid; i < N_GROUPS * n; i += LOCAL_SIZE) {
            const float2 candidate = tops[i / n * MAX_TOP + i % n];
            if (is_before(before, candidate) && is_before(candidate, best)) best = candidate;
        }
        before = reduce_first(best, scratch, lid);
        if (lid == 0) out[1 + k] = (float2)(before.x - log_sum, before.y);
    }
}

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void logprobs_chosen(__global const float* logits, __global const int* state, __global const int* wanted,
                     __global const int2* rules, __global const int2* biases, __global const int* sampled,
                     __global float2* out) {
    const int row = step_row(1), sequence = sequence_of(state, row);
    if (get_local_id(0) > 0 || wanted[sequence] < 0) return;
#ifdef RECORDS
    const int step = state[STATE_STEP];
#else
    const int step = state[STATE_STEP] - 1;  // sampling has already advanced it
#endif
    const int token = sampled[step % STATE_RING * N_SEQUENCES + row];
    out += OUT_OF(step, row);
    float logit = token < VOCAB ? logits[(size_t)row * VOCAB + token] : NAN;
    for (int i = 0; i < rules[sequence].x; ++i)
        if (biases[sequence * MAX_BIASES + i].x == token) logit -= as_float(biases[sequence * MAX_BIASES + i].y);
    out[0] = (float2)(logit - out[0].x, as_float(token));
}

// Adjusts the next token's logits: adds biases and hides every token that is not allowed.
//
//   logits[r][i] += i's bias;    logits[r][i] = -inf if bit i in `allowed` is 0
//
// logits   float [n][VOCAB], per row in the step (step_rows.cl); per sequence:
// rules    int2: number of biases, whether `allowed` is used
// biases   int2 [MAX_BIASES]: (token, bias bits), each token once
// allowed  uint [(VOCAB + 31) / 32]: token 0 is the first word's lowest bit
// Index space: N_GROUPS groups of LOCAL_SIZE a row, which share the vocabulary.
// Build: VOCAB, MAX_BIASES, N_GROUPS, LOCAL_SIZE, step state constants.
#if !defined(VOCAB) || !defined(MAX_BIASES) || !defined(N_GROUPS) || !defined(LOCAL_SIZE) || !defined(STATE_POSITION)
#error "logit_bias.cl needs the build constants VOCAB, MAX_BIASES, N_GROUPS, LOCAL_SIZE and those of the step state"
#endif
#include "common/step_rows.cl"

#define PARTITION ((VOCAB + N_GROUPS - 1) / N_GROUPS)

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void logit_bias(__global float* logits, __global const int* state, __global const int2* rules, __global const int2* biases,
                __global const uint* allowed) {
    const int lid = get_local_id(0), row = step_row(1), sequence = sequence_of(state, row);
    const int begin = min(VOCAB, (int)get_group_id(0) * PARTITION), end = min(VOCAB, begin + PARTITION);
    const int2 rule = rules[sequence];
    logits += (size_t)row * VOCAB;
    biases += (size_t)sequence * MAX_BIASES;
    allowed += (size_t)sequence * ((VOCAB + 31) / 32);
    for (int i = lid; i < rule.x; i += LOCAL_SIZE) {
        const int2 bias = biases[i];
        if (begin <= bias.x && bias.x < end) logits[bias.x] += as_float(bias.y);
    }
    barrier(CLK_GLOBAL_MEM_FENCE);
    for (int i = rule.y ? begin + lid : end; i < end; i += LOCAL_SIZE)
        if (!(allowed[i / 32] >> i % 32 & 1u)) logits[i] = -INFINITY;
}

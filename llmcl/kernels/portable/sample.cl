// Sampling on the device, without a sort: penalties, then one threshold for top-k, top-p and min-p (in this order,
// llama.cpp's), then temperature. The token is an argmax:
//
//   token = argmax over { l_i >= threshold } of l_i / temperature + g_i,    g_i = -log(-log(u_i))
//
// which is distributed as softmax(l / temperature) (Gumbel 1954; Maddison et al. 2014). u_i is a hash of seed, step
// and token id, so a seed reproduces its tokens whatever the work-groups' order. Temperature 0 is greedy, g = 0.
//
// These kernels choose without a threshold. sample_threshold.cl holds the kernels with a threshold, as a separate program because
// compiling
// takes twice as long. On a CPU, greedy rows without penalties use sample_largest.cl.
//
// logits     float [VOCAB]          last_seen  int [VOCAB], each token's latest position, negative: never
// counts     int [VOCAB], each token's count in the answer; updated by the step's last kernel if a penalty needs it
// state      see STATE_*            sampling   int [SAMPLING_SLOTS], see SAMPLING_*; floats by their bits
// best       float2 [BEST_SLOTS], at least N_GROUPS: (score, token id bits)
// tokens     int [.]: the next step's input        sampled  int [STATE_RING]: tokens handed to the host, by step
//
// A step with several sequences (step_rows.cl) has logits and best per row, last_seen, counts, sampling and tokens per sequence,
// and sampled [STATE_RING][N_SEQUENCES], indexed by step number.
// Index space: N_GROUPS groups, local size LOCAL_SIZE; one group for sample_finish; with several sequences, for each row.
// Build: VOCAB, LOCAL_SIZE (a power of two), N_GROUPS, BEST_SLOTS, N_SEQUENCES (1), ROLL_LOOPS (1: loops without barriers
// stay rolled). The host must have checked the parameter ranges.
#if !defined(VOCAB) || !defined(LOCAL_SIZE) || !defined(N_GROUPS) || !defined(N_SEQUENCES) || !defined(STATE_STEP) || \
    !defined(SAMPLING_THRESHOLD)
#error "sample.cl needs the build constants VOCAB, LOCAL_SIZE, N_GROUPS, N_SEQUENCES and those of the step state"
#endif
#include "portable/token_scores.cl"

// best[group] = the best score in the group's partition of the vocabulary.
inline void best_of_partition(const int group, __global const float* logits, __global const int* last_seen, __global const int* counts,
                              __global const int* state, __global const int* sampling, __global float2* best,
                              __local float2* scratch) {
    const int lid = get_local_id(0), position = last_position(state);
    const int2 partition = partition_of(group);
    const float temperature = as_float(sampling[SAMPLING_TEMPERATURE]);
    const uint2 keys = noise_keys(state, sampling);
    float score = -INFINITY;
    int token = VOCAB;
    for (int first = partition.x + lid; first < partition.y; first += BATCH * LOCAL_SIZE) {
        float l[BATCH];
        next_logits(l, logits, last_seen, counts, sampling, position, first, partition.y);
#pragma unroll
        for (int u = 0; u < BATCH; ++u)
            if (!isnan(l[u])) {
                const int i = first + u * LOCAL_SIZE;
                keep_better(&score, &token, score_of(l[u], i, temperature, keys), i);
            }
    }
    const float2 found = reduce_best((float2)(score, as_float(token)), scratch, lid);
    if (lid == 0) best[group] = found;
}

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void sample_partial(__global const float* logits, __global const int* last_seen, __global const int* counts, __global const int* state,
                    __global const int* sampling, __global float2* best) {
    __local float2 scratch[LOCAL_SIZE];
    OF_ROW(0) LOGITS_OF_ROW
    best_of_partition(get_group_id(0), logits, last_seen, counts, state, sampling, best, scratch);
}

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void sample_finish(__global const float2* best, __global const int* sampling, __global int* state, __global int* tokens,
                   __global int* sampled, __global int* counts) {
    __local float2 scratch[LOCAL_SIZE];
    const int lid = get_local_id(0);
    OF_ROW(0)
    float score = -INFINITY;
    int token = VOCAB;
    for (int i = lid; i < N_GROUPS; i += LOCAL_SIZE) keep_better(&score, &token, best[i].x, as_int(best[i].y));
    const float2 found = reduce_best((float2)(score, as_float(token)), scratch, lid);
    if (lid == 0) end_step(found, row, sampling, state, tokens, sampled, counts);
}

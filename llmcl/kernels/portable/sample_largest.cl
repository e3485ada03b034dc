// Samples rows with temperature 0 and no penalties on devices where a single vectorised work-item scans a vocabulary in microseconds: the
// token with the largest logit, the first on ties. sample_partial and sample_finish (sample.cl) then skip such rows. Elsewhere they do
// the
// work.
//
// logits  float [VOCAB]      state, sampling, tokens, sampled, counts, also with several sequences: see sample.cl
//
//   lane l in stream u has the largest of the logits 64 i + 16 u + l        [ stream 0 | stream 1 | stream 2 | stream 3 | stream 0 | ...
//
// Index space: single-work-item groups; with several sequences one per row, in the second dimension.
// Build: VOCAB, N_SEQUENCES, WIDTH 16 (lanes.cl), SAMPLING_*, step state constants. A NaN is never chosen.
#if !defined(VOCAB) || !defined(N_SEQUENCES) || !defined(WIDTH) || !defined(SAMPLING_TRUNCATES) || !defined(STATE_POSITION)
#error "sample_largest.cl needs the build constants VOCAB, N_SEQUENCES, WIDTH, those of sampling and of the step state"
#endif
#include "common/common.cl"
#include "common/lanes.cl"
#include "common/step_rows.cl"
#include "portable/end_step.cl"

#define STREAMS 4  // a comparison need not wait for the previous one
#define LANES (16 * STREAMS)

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void sample_largest(__global const float* logits, __global const int* sampling, __global int* state, __global int* tokens,
                    __global int* sampled, __global int* counts) {
#ifdef RECORDS
    const int row = step_row(1);
    sampling += sequence_of(state, row) * SAMPLING_SLOTS;
    if (sampling[SAMPLING_TRUNCATES] != LARGEST) return;
    logits += (size_t)row * VOCAB;
#else
    const int row = 0;
#endif
    lanes_t best[STREAMS];
    int16 first[STREAMS];  // lane 0's token when the lane's largest was found
#pragma unroll
    for (int u = 0; u < STREAMS; ++u) {
        best[u] = -INFINITY;
        first[u] = VOCAB;
    }
    for (int i = 0; i < VOCAB / LANES * LANES; i += LANES) {
#pragma unroll
        for (int u = 0; u < STREAMS; ++u) {
            const lanes_t l = load_lanes(logits + i + 16 * u);
            first[u] = l > best[u] ? (int16)(i + 16 * u) : first[u];
            best[u] = l > best[u] ? l : best[u];
        }
    }
    float score = -INFINITY;
    int token = VOCAB;
    for (int u = 0; u < STREAMS; ++u) {
        for (int lane = 0; lane < 16; ++lane) {
            const float l = ((const float*)&best[u])[lane];
            const int of_lane = ((const int*)&first[u])[lane] + lane;
            if (l > score || (l == score && of_lane < token)) {
                score = l;
                token = of_lane;
            }
        }
    }
    for (int i = VOCAB / LANES * LANES; i < VOCAB; ++i) {
        if (logits[i] > score) {
            score = logits[i];
            token = i;
        }
    }
    end_step((float2)(score, as_float(token)), row, sampling, state, tokens, sampled, counts);
}

// Shared by the sampling kernels (sample.cl, sample_threshold.cl): a logit after penalties, and its score.
//
// Penalties: l / r or l r (repetition, for recent tokens), then l - presence - frequency count (for tokens in the answer).
// Buffers and build constants: see sample.cl.
#include "common/common.cl"
#include "common/reduce.cl"
#include "common/step_rows.cl"
#include "portable/end_step.cl"

inline float repeat_penalized(const float l, __global const int* last_seen, __global const int* sampling, const int position,
                              const int i) {
    const float penalty = as_float(sampling[SAMPLING_REPEAT_PENALTY]);
    if (penalty == 1.0f) return l;  // before the load, which is half a vocabulary pass's reads
    const int seen = last_seen[i];
    if (seen < 0 || seen > position || seen <= position - sampling[SAMPLING_REPEAT_WINDOW]) return l;
    return l > 0.0f ? l / penalty : l * penalty;
}

inline float penalized(__global const float* logits, __global const int* last_seen, __global const int* counts,
                       __global const int* sampling, const int position, const int i) {
    const float l = repeat_penalized(logits[i], last_seen, sampling, position, i);
    const int count = counts_tokens(sampling) ? counts[i] : 0;
    if (count == 0) return l;
    return l - as_float(sampling[SAMPLING_PRESENCE_PENALTY]) - as_float(sampling[SAMPLING_FREQUENCY_PENALTY]) * count;
}

// A group's partition of the vocabulary.
#define PARTITION ((VOCAB + N_GROUPS - 1) / N_GROUPS)
inline int2 partition_of(const int group) { return (int2)(min(VOCAB, group * PARTITION), min(VOCAB, (group + 1) * PARTITION)); }

// A work-item's next BATCH logits, LOCAL_SIZE apart, all requested before the first is used; NaN past the end.
#define BATCH 4
#if ROLL_LOOPS  // on a CPU: unrolled around atomic additions, Intel's driver compiles longer and slower code
#define ROLLED _Pragma("unroll 1")
#define EACH_OF_BATCH(u) ROLLED for (int u = 0; u < BATCH; ++u)
#else
#define ROLLED
#define EACH_OF_BATCH(u) _Pragma("unroll") for (int u = 0; u < BATCH; ++u)
#endif
inline void next_logits(float l[BATCH], __global const float* logits, __global const int* last_seen,
                        __global const int* counts, __global const int* sampling, const int position, const int first, const int end) {
    EACH_OF_BATCH(u) {
        const int i = first + u * LOCAL_SIZE;
        l[u] = i < end ? penalized(logits, last_seen, counts, sampling, position, i) : NAN;
    }
}

// The position of the step's latest token, whose logits are sampled.
inline int last_position(__global const int* state) { return state[STATE_POSITION] + state[STATE_N_TOKENS] - 1; }

inline uint mix32(uint x) {
    x = (x ^ (x >> 16)) * 0x21f0aaadu;
    x = (x ^ (x >> 15)) * 0xd35a2d97u;
    return x ^ (x >> 15);
}

// Keeps the larger score, on ties the lower token. NaN never wins.
inline void keep_better(float* score, int* token, const float other, const int other_token) {
    if (other > *score || (other == *score && other_token < *token)) {
        *score = other;
        *token = other_token;
    }
}

// The keys for the noise of a step's tokens.
inline uint2 noise_keys(__global const int* state, __global const int* sampling) {
    const uint token_key = mix32((uint)sampling[SAMPLING_SEED_LO] + 0x9e3779b9u);
    return (uint2)(token_key, mix32(mix32(token_key + (uint)sampling[SAMPLING_SEED_HI] + 0x85ebca6bu) ^
                                    (uint)state[STATE_STEP]));
}

// A number between 0 and 1 for a token of the step.
inline float uniform_of(const uint token, const uint2 keys) {
    return ((float)(mix32(mix32(token ^ keys.x) + keys.y) >> 9) + 0.5f) * 0x1p-23f;
}

inline float score_of(const float l, const int token, const float temperature, const uint2 keys) {
    return temperature > 0.0f ? l / temperature - log(-log(uniform_of(token, keys))) : l;
}

// (score, token bits) pairs in keep_better's order.
inline float2 better_of(const float2 a, const float2 b) {
    return b.x > a.x || (b.x == a.x && as_int(b.y) < as_int(a.y)) ? b : a;
}
inline float2 reduce_best(const float2 v, __local float2* scratch, const int lid) REDUCED(float2, better_of)

// Offsets of a row's data. In a step with several sequences some rows need a threshold and some don't; each kernel skips
// the other kind.
#ifdef RECORDS
#define OF_ROW(truncates)                                                            \
    const int row = step_row(1), sequence = sequence_of(state, row);                 \
    sampling += sequence * SAMPLING_SLOTS;                                           \
    if (sampling[SAMPLING_TRUNCATES] != (truncates)) return;                         \
    best += row * BEST_SLOTS;
#define LOGITS_OF_ROW                     \
    logits += (size_t)row * VOCAB;        \
    last_seen += (size_t)sequence * VOCAB; \
    counts += (size_t)sequence * VOCAB;   \
    state = sequence_state(state, row);
#else
#define OF_ROW(truncates) const int row = 0;
#define LOGITS_OF_ROW
#endif

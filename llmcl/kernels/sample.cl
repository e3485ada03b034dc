// Sampling on the device, without a sort: repetition penalty, then one threshold for top-k, top-p and min-p (in this
// order, llama.cpp's), then temperature. The token is an argmax:
//
//   token = argmax over { l_i >= threshold } of l_i / temperature + g_i,    g_i = -log(-log(u_i))
//
// which is distributed as softmax(l / temperature) (Gumbel 1954; Maddison et al. 2014). u_i is a hash of seed, step
// and token id, so a seed gives the same tokens again whatever the work-groups' order. Temperature 0 is greedy, g = 0.
//
// logits     float [VOCAB]          last_seen  int [VOCAB], the latest position of each token, negative: never
// state      see STATE_*            sampling   int [9], see SAMPLING_*; floats by their bits
// best       float2 [N_GROUPS]: (score, token id by its bits)
// Build: VOCAB, LOCAL_SIZE (a power of two), N_GROUPS. The host must have checked the ranges of the parameters.
#if !defined(VOCAB) || !defined(LOCAL_SIZE) || !defined(N_GROUPS) || !defined(STATE_STEP) || \
    !defined(SAMPLING_THRESHOLD)
#error "sample.cl needs the build constants VOCAB, LOCAL_SIZE, N_GROUPS and those of the step state"
#endif
#include "common.cl"

inline float penalized(__global const float* logits, __global const int* last_seen, __global const int* sampling,
                       const int position, const int i) {
    const float l = logits[i], penalty = as_float(sampling[SAMPLING_PENALTY]);
    if (penalty == 1.0f) return l;  // before the load: half of what a pass over the vocabulary reads
    const int seen = last_seen[i];
    if (seen < 0 || seen > position || seen <= position - sampling[SAMPLING_WINDOW]) return l;
    return l > 0.0f ? l / penalty : l * penalty;
}

// Logits of a work-item's next BATCH tokens, LOCAL_SIZE apart, all asked for before the first is used; past the end NaN.
#define BATCH 8
inline void next_logits(float l[BATCH], __global const float* logits, __global const int* last_seen,
                        __global const int* sampling, const int position, const int first) {
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
        const int i = first + u * LOCAL_SIZE;
        l[u] = i < VOCAB ? penalized(logits, last_seen, sampling, position, i) : NAN;
    }
}

// The position of the latest token of the step, whose logits these are.
inline int last_position(__global const int* state) { return state[STATE_POSITION] + state[STATE_N_TOKENS] - 1; }

// An order-preserving map from float to uint, and back.
inline uint key_of(float x) {
    const uint u = as_uint(x);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

inline float value_of(uint key) { return as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

inline float reduce_max(float v, __local float* scratch, const int lid) {
    barrier(CLK_LOCAL_MEM_FENCE);
    scratch[lid] = v;
    for (int width = LOCAL_SIZE / 2; width > 0; width /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < width) scratch[lid] = fmax(scratch[lid], scratch[lid + width]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return scratch[0];
}

inline float reduce_sum(float v, __local float* scratch, const int lid) {
    barrier(CLK_LOCAL_MEM_FENCE);
    scratch[lid] = v;
    for (int width = LOCAL_SIZE / 2; width > 0; width /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < width) scratch[lid] += scratch[lid + width];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return scratch[0];
}

// Probabilities as integers whose sum over the vocabulary is close to 2^31: their sums do not depend on the order of
// the atomic additions.
inline uint mass_of(float l, float top, float inverse_sum) { return (uint)(exp(l - top) * inverse_sum * 0x1p31f); }

// The largest key t for which the measure of { key >= t } reaches `target`, found digit by digit from the top (radix
// selection). The measure of a set is its count, or with BY_MASS the mass of its members at or above `floor_key`.
// target 0 stands for `share` of the whole measure.
inline uint radix_threshold(__global const float* logits, __global const int* last_seen, __global const int* sampling,
                            const int position, const bool by_mass, uint target, const float share,
                            const uint floor_key, const float top, const float inverse_sum, __local uint* histogram,
                            __local uint* found, const int lid) {
    uint prefix = 0, above = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = lid; i < 256; i += LOCAL_SIZE) histogram[i] = 0;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int first = lid; first < VOCAB; first += BATCH * LOCAL_SIZE) {
            float l[BATCH];
            next_logits(l, logits, last_seen, sampling, position, first);
#pragma unroll
            for (int u = 0; u < BATCH; ++u) {
                const uint key = key_of(l[u]);
                if (isnan(l[u]) || key < floor_key || (shift < 24 && (key >> (shift + 8)) != prefix)) continue;
                atomic_add(histogram + ((key >> shift) & 255u), by_mass ? mass_of(l[u], top, inverse_sum) : 1u);
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid == 0) {
            if (target == 0) {
                uint whole = 0;
                for (int i = 0; i < 256; ++i) whole += histogram[i];
                target = max(1u, (uint)ceil(share * (float)whole));
                target = min(target, whole);
            }
            int digit = 255;
            while (digit > 0 && above + histogram[digit] < target) above += histogram[digit--];
            found[0] = digit;
            found[1] = above;
            found[2] = target;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        prefix = (prefix << 8) | found[0];
        above = found[1];
        target = found[2];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    return prefix;
}

// Writes sampling[SAMPLING_THRESHOLD]. One work-group; launched only when top-k, top-p or min-p is on.
__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void sample_threshold(__global const float* logits, __global const int* last_seen, __global const int* state,
                      __global int* sampling) {
    __local float scratch[LOCAL_SIZE];
    __local uint histogram[256], found[3];
    const int lid = get_local_id(0), position = last_position(state);
    const int top_k = sampling[SAMPLING_TOP_K];
    const float top_p = as_float(sampling[SAMPLING_TOP_P]), min_p = as_float(sampling[SAMPLING_MIN_P]);

    float best = -INFINITY;
    for (int first = lid; first < VOCAB; first += BATCH * LOCAL_SIZE) {
        float l[BATCH];
        next_logits(l, logits, last_seen, sampling, position, first);
#pragma unroll
        for (int u = 0; u < BATCH; ++u) best = fmax(best, l[u]);
    }
    best = reduce_max(best, scratch, lid);

    uint key = 0;
    if (top_k > 0 && top_k < VOCAB)
        key = radix_threshold(logits, last_seen, sampling, position, false, top_k, 0.0f, 0, 0.0f, 0.0f, histogram,
                              found, lid);
    if (top_p < 1.0f) {
        float sum = 0.0f;
        for (int first = lid; first < VOCAB; first += BATCH * LOCAL_SIZE) {
            float l[BATCH];
            next_logits(l, logits, last_seen, sampling, position, first);
#pragma unroll
            for (int u = 0; u < BATCH; ++u)
                if (!isnan(l[u]) && key_of(l[u]) >= key) sum += exp(l[u] - best);
        }
        sum = reduce_sum(sum, scratch, lid);
        key = max(key, radix_threshold(logits, last_seen, sampling, position, true, 0, top_p, key, best, 1.0f / sum,
                                       histogram, found, lid));
    }
    if (lid == 0) {
        float threshold = key == 0 ? -INFINITY : value_of(key);
        if (min_p > 0.0f) threshold = fmax(threshold, best + log(min_p));
        sampling[SAMPLING_THRESHOLD] = as_int(fmin(threshold, best));
    }
}

inline uint mix32(uint x) {
    x = (x ^ (x >> 16)) * 0x21f0aaadu;
    x = (x ^ (x >> 15)) * 0xd35a2d97u;
    return x ^ (x >> 15);
}

// Keeps the larger score; of equal scores the lower token. A score that is not a number never wins.
inline void keep_better(float* score, int* token, const float other, const int other_token) {
    if (other > *score || (other == *score && other_token < *token)) {
        *score = other;
        *token = other_token;
    }
}

// best[group] = the best score of the group's share of the vocabulary.
__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void sample_partial(__global const float* logits, __global const int* last_seen, __global const int* state,
                    __global const int* sampling, __global float2* best) {
    __local float scores[LOCAL_SIZE];
    __local int tokens[LOCAL_SIZE];
    const int lid = get_local_id(0), position = last_position(state);
    const float temperature = as_float(sampling[SAMPLING_TEMPERATURE]);
    const float threshold = as_float(sampling[SAMPLING_THRESHOLD]);
    const uint token_key = mix32((uint)sampling[SAMPLING_SEED_LO] + 0x9e3779b9u);
    const uint step_key =
        mix32(mix32(token_key + (uint)sampling[SAMPLING_SEED_HI] + 0x85ebca6bu) ^ (uint)state[STATE_STEP]);

    float score = -INFINITY;
    int token = VOCAB;
    for (int i = get_global_id(0); i < VOCAB; i += N_GROUPS * LOCAL_SIZE) {
        const float l = penalized(logits, last_seen, sampling, position, i);
        if (!(l >= threshold)) continue;
        float s = l;
        if (temperature > 0.0f) {
            const float u = ((float)(mix32(mix32((uint)i ^ token_key) + step_key) >> 9) + 0.5f) * 0x1p-23f;
            s = l / temperature - log(-log(u));
        }
        keep_better(&score, &token, s, i);
    }
    scores[lid] = score;
    tokens[lid] = token;
    for (int width = LOCAL_SIZE / 2; width > 0; width /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < width) {
            keep_better(&score, &token, scores[lid + width], tokens[lid + width]);
            scores[lid] = score;
            tokens[lid] = token;
        }
    }
    if (lid == 0) best[get_group_id(0)] = (float2)(score, as_float(token));
}

// Takes the best of all, feeds it to the next step and moves the position on: the step's end. One work-item.
// tokens  int [.]: the next step's input        sampled  int [STATE_RING]: tokens handed to the host, by step
// If no logit is a number, the token is VOCAB and the host reports it.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void sample_finish(__global const float2* best, __global int* state, __global int* tokens, __global int* sampled) {
    float score = -INFINITY;
    int token = VOCAB;
#pragma unroll 32
    for (int g = 0; g < N_GROUPS; ++g) keep_better(&score, &token, best[g].x, as_int(best[g].y));
    sampled[state[STATE_STEP] % STATE_RING] = token;
    tokens[0] = min(token, VOCAB - 1);
    state[STATE_POSITION] += state[STATE_N_TOKENS];
    state[STATE_N_TOKENS] = 1;
    state[STATE_STEP] += 1;
}

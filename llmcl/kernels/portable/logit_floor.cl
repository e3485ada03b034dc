// The smallest logit that may survive, from sums over the whole vocabulary (sample_threshold.cl with FILTERS): top-n-sigma
// keeps logits down to a number of standard deviations below the largest, mirostat down to a probability of 2^-mu.
#define IS_MIROSTAT(sampling) ((sampling)[SAMPLING_MIROSTAT] != 0)

// Whether top-p is the first sampler, and takes its share of the whole vocabulary's mass.
#define STARTS_WITH_TOP_P(sampling)                                                       \
    (!measures_count(sampling) && !(as_float((sampling)[SAMPLING_TYPICAL_P]) < 1.0f) && \
     !(as_float((sampling)[SAMPLING_TOP_N_SIGMA]) > 0.0f))

// Whether a logit can survive although top-p or min-p alone would drop it: an earlier sampler drops likelier tokens, or a
// part of the mass.
#define KEEPS_LOW_LOGITS(sampling)     \
    (IS_MIROSTAT(sampling) ||          \
     (!measures_count(sampling) && (as_float((sampling)[SAMPLING_TYPICAL_P]) < 1.0f || \
                                    (as_float((sampling)[SAMPLING_TOP_P]) < 1.0f && !STARTS_WITH_TOP_P(sampling)))))

// Mirostat's probabilities are those after the temperature.
inline float inverse_heat(__global const int* sampling) {
    return IS_MIROSTAT(sampling) ? 1.0f / as_float(sampling[SAMPLING_TEMPERATURE]) : 1.0f;
}

// (count, mean, sum of squared distances from the mean) of some logits, and one more (Welford). Infinite logits don't count.
inline float3 with_logit(float3 spread, const float l) {
    if (isinf(l)) return spread;
    spread.x += 1.0f;
    const float distance = l - spread.y;
    spread.y += distance / spread.x;
    spread.z += distance * (l - spread.y);
    return spread;
}

inline float3 joined_spread(const float3 spread, __local float* scratch, const int lid) {
    const float n = reduce_sum(spread.x, scratch, lid);
    const float mean = reduce_sum(spread.x * spread.y, scratch, lid) / fmax(n, 1.0f);
    const float distance = spread.y - mean;
    return (float3)(n, mean, reduce_sum(spread.z + spread.x * distance * distance, scratch, lid));
}

inline float logit_floor(__global const int* sampling, __global const float2* best, const float top, const float sum_of_all,
                         __local float* scratch, const int lid) {
    float3 spread = 0.0f;  // each work-item joins every LOCAL_SIZE-th group's
    for (int i = lid; i < N_GROUPS; i += LOCAL_SIZE) {
        const float2 moments = best[N_GROUPS + 2 * i];
        const float n = spread.x + moments.x, distance = moments.y - spread.y;
        if (n == 0.0f) continue;
        spread.z += best[N_GROUPS + 2 * i + 1].x + distance * distance * spread.x * moments.x / n;
        spread.y += distance * moments.x / n;
        spread.x = n;
    }
    spread = joined_spread(spread, scratch, lid);
    const float sigmas = as_float(sampling[SAMPLING_TOP_N_SIGMA]), mu = as_float(sampling[SAMPLING_MU]);
    const float by_sigma = sigmas > 0.0f ? top - sigmas * sqrt(spread.z / fmax(spread.x, 1.0f)) : -INFINITY;
    const float by_surprise = top + (log(sum_of_all) - mu * M_LN2_F) / inverse_heat(sampling);
    return fmin(IS_MIROSTAT(sampling) ? by_surprise : by_sigma, top);
}

// Samplers beyond top-k, top-p and min-p (sample_threshold.cl with FILTERS). Each stage leaves the logits in an interval,
// so ties survive together. The order is llama.cpp's: top-n-sigma (logit_floor.cl), top-k, typical-p, top-p, min-p, XTC,
// dynamic temperature. Mirostat replaces them all.
//
//   typical-p    keeps the logits nearest to the mean logit, that is surprises nearest to the entropy, up to a mass
//   XTC          with a probability drops all but the least likely of the tokens above a threshold
//   temperature  T - range + 2 range (entropy / log(number of survivors))^exponent
//   mirostat     drops surprises above mu, then mu -= eta (surprise of the chosen token - tau)
enum { TOP_K_STAGE, TYPICAL_P_STAGE, TOP_P_STAGE, MIN_P_STAGE, XTC_STAGE, TEMPERATURE_STAGE, N_STAGES };
#define XTC_NOISE 0xffffffffu  // no token's id
#define LEAST_TEMPERATURE 1e-30f  // below, the largest logit is taken

typedef struct {
    float low, high, temperature;
    float mass;  // of the survivors, relative to `high`
} Survivors;
#define SURVIVES(l, survivors) ((l) >= (survivors).low && (l) <= (survivors).high)

inline bool stage_is_on(const int stage, __global const int* sampling, const uint2 keys) {
    const float chance = as_float(sampling[SAMPLING_XTC_PROBABILITY]);
    if (IS_MIROSTAT(sampling)) return stage == TEMPERATURE_STAGE;
    return stage == TOP_K_STAGE       ? measures_count(sampling)
           : stage == TYPICAL_P_STAGE ? as_float(sampling[SAMPLING_TYPICAL_P]) < 1.0f
           : stage == TOP_P_STAGE     ? as_float(sampling[SAMPLING_TOP_P]) < 1.0f
           : stage == MIN_P_STAGE     ? as_float(sampling[SAMPLING_MIN_P]) > 0.0f
           : stage == XTC_STAGE       ? chance > 0.0f && as_float(sampling[SAMPLING_XTC_THRESHOLD]) <= 0.5f &&
                                      uniform_of(XTC_NOISE, keys) <= chance
                                      : as_float(sampling[SAMPLING_DYNATEMP_RANGE]) > 0.0f;
}
inline int stage_after(int stage, __global const int* sampling, const uint2 keys) {
    do ++stage;
    while (stage < N_STAGES && !stage_is_on(stage, sampling, keys));
    return stage;
}

// Sums of w and w d over the survivors, for d = (high - l) heat and w = exp(-d). Integers, because candidate order varies.
inline float2 masses_of(__global const float2* candidates, const int n, const Survivors survivors, const float heat,
                        __local ulong* scratch, const int lid) {
    ulong mass = 0, moment = 0;
    for (int i = lid; i < n; i += LOCAL_SIZE) {
        const float l = candidates[i].x;
        if (!SURVIVES(l, survivors)) continue;
        const float distance = l < survivors.high ? fmin((survivors.high - l) * heat, 100.0f) : 0.0f;
        const float weight = exp(-distance) * 0x1p40f;
        mass += (ulong)weight;
        moment += (ulong)(weight * distance);
    }
    const float whole = reduce_sum_ulong(mass, scratch, lid) * 0x1p-40f;
    return (float2)(whole, reduce_sum_ulong(moment, scratch, lid) * 0x1p-40f);
}

inline float dynamic_temperature(__global const int* sampling, const float2 masses, const float n) {
    const float temperature = as_float(sampling[SAMPLING_TEMPERATURE]), range = as_float(sampling[SAMPLING_DYNATEMP_RANGE]);
    const float entropy = log(masses.x) + masses.y / masses.x, least = fmax(0.0f, temperature - range);
    const float share = pow(clamp(entropy / log(n), 0.0f, 1.0f), as_float(sampling[SAMPLING_DYNATEMP_EXPONENT]));
    const float mixed = least + (temperature + range - least) * share;
    return mixed < LEAST_TEMPERATURE ? 0.0f : mixed;
}

// One loop with one body for all stages: PoCL compiles the code after a branch around barriers once per side.
inline Survivors survivors_of(__global const float2* candidates, const int n, __global const int* sampling,
                              __global const float2* best, const uint2 keys, __local uint* histogram, __local uint* found,
                              __local ulong* scratch) {
    const int lid = get_local_id(0);
    __local float* floats = (__local float*)scratch;
    const float heat = inverse_heat(sampling), top = top_of(best, floats, lid);
    Survivors survivors;
    const float sum_of_all = whole_sum(best, top, heat, floats, lid);
    survivors.low = logit_floor(sampling, best, top, sum_of_all, floats, lid);
    survivors.high = top;
    survivors.temperature = as_float(sampling[SAMPLING_TEMPERATURE]);
    survivors.mass = 1.0f;
    for (int stage = stage_after(-1, sampling, keys); stage < N_STAGES; stage = stage_after(stage, sampling, keys)) {
        const float2 masses = masses_of(candidates, n, survivors, heat, scratch, lid);
        const float center = stage == TYPICAL_P_STAGE ? survivors.high - masses.y / masses.x : NAN;
        const float share = as_float(sampling[stage == TYPICAL_P_STAGE ? SAMPLING_TYPICAL_P : SAMPLING_TOP_P]);
        const uint target =
            stage == TOP_K_STAGE ? (uint)sampling[SAMPLING_TOP_K] : max(1u, (uint)ceil(share * 0x1p31f));
        const float mass = stage == TOP_P_STAGE && STARTS_WITH_TOP_P(sampling) ? sum_of_all : masses.x;
        const uint key =
            radix_threshold(candidates, n, stage != TOP_K_STAGE, target, key_of(survivors.low), survivors.high,
                            1.0f / mass, histogram, found, lid, stage <= TOP_P_STAGE, center);
        const float limit = stage <= TOP_P_STAGE   ? value_of(key)
                            : stage == MIN_P_STAGE ? survivors.high + log(as_float(sampling[SAMPLING_MIN_P]))
                            : stage == XTC_STAGE
                                ? survivors.high + log(as_float(sampling[SAMPLING_XTC_THRESHOLD]) * masses.x)
                                : -INFINITY;
        float low = INFINITY, high = -INFINITY;
        ulong n_left = 0;
        for (int i = lid; i < n; i += LOCAL_SIZE) {
            const float l = candidates[i].x;
            if (!SURVIVES(l, survivors) || rank_of(l, center) < limit) continue;
            low = fmin(low, l);
            high = fmax(high, l);
            n_left += l > -INFINITY;
        }
        low = -reduce_max(-low, floats, lid);
        high = reduce_max(high, floats, lid);
        n_left = reduce_sum_ulong(n_left, scratch, lid);
        if (stage < XTC_STAGE) {
            survivors.low = fmin(low, survivors.high);  // if rounding leaves none, the largest
            survivors.high = fmax(high, survivors.low);
        }
        if (stage == XTC_STAGE && n_left > 1) survivors.high = low;
        if (stage == TEMPERATURE_STAGE && n_left > 1 && !IS_MIROSTAT(sampling))
            survivors.temperature = dynamic_temperature(sampling, masses, (float)n_left);
        survivors.mass = masses.x;
    }
    return survivors;
}

// Writes what tests look at, and mirostat's state. chosen: (score, token bits).
inline void write_filters(__global int* sampling, const Survivors survivors, const float2 chosen, const uint2 keys) {
    sampling[SAMPLING_CEILING] = as_int(survivors.high);
    sampling[SAMPLING_HEAT] = as_int(survivors.temperature);
    if (!IS_MIROSTAT(sampling) || isinf(chosen.x)) return;
    // The score is l / temperature + noise, and the noise is known.
    const float noise = -log(-log(uniform_of(as_int(chosen.y), keys)));
    const float surprise = (log(survivors.mass) + survivors.high / survivors.temperature - (chosen.x - noise)) / M_LN2_F;
    const float error = surprise - as_float(sampling[SAMPLING_MIROSTAT_TAU]);
    sampling[SAMPLING_MU] = as_int(as_float(sampling[SAMPLING_MU]) - as_float(sampling[SAMPLING_MIROSTAT_ETA]) * error);
}

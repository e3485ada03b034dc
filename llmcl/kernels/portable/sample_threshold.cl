// Sampling with a single threshold on the logits for top-k, top-p and min-p (in this order, llama.cpp's): the best-scoring token
// among logits at or above the threshold (sample.cl).
//
// With FILTERS the kernels also have the samplers of survivors.cl. They are a program apart, so other rows pay nothing.
//
// sample_threshold_histogram and sample_threshold_candidates share the vocabulary among all groups and leave
// sample_threshold_select only the few logits that may be above the threshold.
//
// best       float2 [BEST_SLOTS], from sample_threshold_histogram: (largest logit, sum of exp(l - largest)) for each group; with
//            FILTERS followed by (count, mean) and (sum of squared distances from the mean, 0) for each group
// bins       uint [BINS + 1], 0 before and after a step: a histogram over the upper bits of the logits' keys, and the
//            number of candidates
// candidates float2 [VOCAB]: (penalised logit, token id bits), in any order
// remaining buffers: see sample.cl. With several sequences, best, bins and candidates are per row.
//
// Index space: N_GROUPS groups, local size LOCAL_SIZE; one group for sample_threshold_select; with several sequences, for each row.
// Build: as sample.cl, FILTERS (0 or 1), CHOICE (the rows' SAMPLING_TRUNCATES).
#if !defined(VOCAB) || !defined(LOCAL_SIZE) || !defined(N_GROUPS) || !defined(N_SEQUENCES) || !defined(STATE_STEP) || \
    !defined(SAMPLING_THRESHOLD)
#error "sample_threshold.cl needs the build constants VOCAB, LOCAL_SIZE, N_GROUPS, N_SEQUENCES and those of the step state"
#endif
#include "portable/token_scores.cl"
#if FILTERS
#include "portable/logit_floor.cl"
#else
#define inverse_heat(sampling) 1.0f
#define KEEPS_LOW_LOGITS(sampling) false
#endif

// An order-preserving map from float to uint, and back.
inline uint key_of(float x) {
    const uint u = as_uint(x);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

inline float value_of(uint key) { return as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

inline ulong reduce_sum_ulong(const ulong v, __local ulong* scratch, const int lid) REDUCED(ulong, SUM_OF)

// Histogram bins over the keys' upper 11 bits: sign, exponent, and a quarter of a power of two.
#define BIN_SHIFT 21
#define BINS 2048
#define BLOCK 32  // bins added up by one work-item
inline float bin_high(const int bin) { return value_of(((uint)bin + 1u) * (1u << BIN_SHIFT) - 1u); }

// With top-k a bin counts its logits. Otherwise it adds up their mass relative to the bin's upper edge, rounded down to units with room
// for VOCAB units: the overall largest logit is not known yet.
#define BIN_UNIT (0x7fffffffu / VOCAB)
inline bool measures_count(__global const int* sampling) {
    return sampling[SAMPLING_TOP_K] > 0 && sampling[SAMPLING_TOP_K] < VOCAB;
}
inline uint measure_of(const float l, const int bin, const bool by_count) {
    return by_count ? 1 : isinf(l) ? 0 : (uint)(exp(l - bin_high(bin)) * BIN_UNIT);
}

// Adds the group's partition to `bins`, and stores its largest logit and the sum of exp(l - largest) in best[group].
inline void histogram_of_partition(const int group, __global const float* logits, __global const int* last_seen, __global const int* counts,
                                   __global const int* state, __global const int* sampling, __global float2* best,
                                   __global uint* bins, __local uint* own, __local float* scratch) {
    const int lid = get_local_id(0), position = last_position(state);
    const int2 partition = partition_of(group);
    const bool by_count = measures_count(sampling);
    for (int i = lid; i < BINS; i += LOCAL_SIZE) own[i] = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    float own_top = -INFINITY, sum = 0.0f;  // relative to the largest so far, so one pass is enough
    const float heat = inverse_heat(sampling);
#if FILTERS
    float3 spread = 0.0f;
#endif
    for (int first = partition.x + lid; first < partition.y; first += BATCH * LOCAL_SIZE) {
        float l[BATCH];
        next_logits(l, logits, last_seen, counts, sampling, position, first, partition.y);
        EACH_OF_BATCH(u) {
            if (isnan(l[u])) continue;
#if FILTERS
            spread = with_logit(spread, l[u]);
#endif
            const float share = exp(-fabs(l[u] - own_top) * heat);
            if (l[u] > own_top) {
                sum = sum * share + 1.0f;
                own_top = l[u];
            } else if (l[u] > -INFINITY) {
                sum += share;
            }
            const int bin = key_of(l[u]) >> BIN_SHIFT;
            const uint measure = measure_of(l[u], bin, by_count);
            if (measure > 0) atomic_add(own + bin, measure);
        }
    }
    const float top = reduce_max(own_top, scratch, lid);
    sum = reduce_sum(own_top > -INFINITY ? sum * exp((own_top - top) * heat) : 0.0f, scratch, lid);
    if (lid == 0) best[group] = (float2)(top, sum);
#if FILTERS
    spread = joined_spread(spread, scratch, lid);
    if (lid == 0) {
        best[N_GROUPS + 2 * group] = spread.xy;
        best[N_GROUPS + 2 * group + 1] = (float2)(spread.z, 0.0f);
    }
#endif
    for (int i = lid; i < BINS; i += LOCAL_SIZE)
        if (own[i] > 0) atomic_add(bins + i, own[i]);
}

// The largest logit over the vocabulary.
inline float top_of(__global const float2* best, __local float* scratch, const int lid) {
    float top = -INFINITY;
    for (int i = lid; i < N_GROUPS; i += LOCAL_SIZE) top = fmax(top, best[i].x);
    return reduce_max(top, scratch, lid);
}

// The sum of exp((l - top) heat) over the vocabulary.
inline float whole_sum(__global const float2* best, const float top, const float heat, __local float* scratch, const int lid) {
    float sum = 0.0f;
    for (int i = lid; i < N_GROUPS; i += LOCAL_SIZE)
        if (best[i].x > -INFINITY) sum += best[i].y * exp((best[i].x - top) * heat);
    return reduce_sum(sum, scratch, lid);
}

// The lowest bin that may contain a logit above the threshold.
inline int lowest_bin(__global const int* sampling, __global const float2* best, __global const uint* bins,
                      __local float* measures, __local float* scratch, __local int* found) {
    const int lid = get_local_id(0);
    const float top_p = as_float(sampling[SAMPLING_TOP_P]), min_p = as_float(sampling[SAMPLING_MIN_P]);
    const float top = top_of(best, scratch, lid);
    const float sum_of_all = whole_sum(best, top, inverse_heat(sampling), scratch, lid);
    const bool by_count = measures_count(sampling);
#if FILTERS
    const int floor_bin = key_of(logit_floor(sampling, best, top, sum_of_all, scratch, lid)) >> BIN_SHIFT;
#else
    const int floor_bin = 0;
#endif
    // Slightly more than the share, to cover rounding in the sums.
    const float target = by_count ? (float)sampling[SAMPLING_TOP_K] : top_p * 1.00001f * sum_of_all * BIN_UNIT;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = lid; i < BINS; i += LOCAL_SIZE) {
        const uint measure = bins[i];
        measures[i] = measure == 0 ? 0.0f : by_count ? measure : measure * exp(fmin(bin_high(i) - top, 80.0f));
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int block = lid; block < BINS / BLOCK; block += LOCAL_SIZE) {
        float sum = 0.0f;
        for (int i = 0; i < BLOCK; ++i) sum += measures[block * BLOCK + i];
        scratch[block] = sum;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lid == 0) {
        float above = 0.0f;
        int block = BINS / BLOCK - 1;
        ROLLED while (block > 0 && above + scratch[block] < target) above += scratch[block--];
        int bin = block * BLOCK + BLOCK - 1;
        ROLLED while (bin > block * BLOCK && above + measures[bin] < target) above += measures[bin--];
        // No early return: PoCL compiles the code after a branch around barriers once per side.
        bin = by_count || top_p < 1.0f ? bin : (int)(key_of(top + log(min_p)) >> BIN_SHIFT);
        *found = KEEPS_LOW_LOGITS(sampling) ? floor_bin : max(floor_bin, bin);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return *found;
}

// Appends the group's logits in the lowest bin and above to `candidates`.
inline void candidates_of_partition(const int group, __global const float* logits, __global const int* last_seen, __global const int* counts,
                                    __global const int* state, __global const int* sampling, __global const float2* best,
                                    __global uint* bins, __global float2* candidates, __local float* measures,
                                    __local float* scratch, __local int* found) {
    const int lid = get_local_id(0), position = last_position(state);
    const int2 partition = partition_of(group);
    const int lowest = lowest_bin(sampling, best, bins, measures, scratch, found);
    __local uint* taken = (__local uint*)scratch;  // number taken by the group in this pass, and its first index
    for (int begin = partition.x; begin < partition.y; begin += BATCH * LOCAL_SIZE) {
        float l[BATCH];
        uint place[BATCH];
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid == 0) taken[0] = 0;
        barrier(CLK_LOCAL_MEM_FENCE);
        next_logits(l, logits, last_seen, counts, sampling, position, begin + lid, partition.y);
        EACH_OF_BATCH(u) {
            place[u] = VOCAB;
            if (!isnan(l[u]) && (int)(key_of(l[u]) >> BIN_SHIFT) >= lowest) place[u] = atomic_inc(taken);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid == 0 && taken[0] > 0) taken[1] = atomic_add(bins + BINS, taken[0]);
        barrier(CLK_LOCAL_MEM_FENCE);
        EACH_OF_BATCH(u)
            if (place[u] < VOCAB)
                candidates[taken[1] + place[u]] = (float2)(l[u], as_float(begin + lid + u * LOCAL_SIZE));
    }
}

// Probabilities as integers with a sum close to 2^31 over the vocabulary: integer sums don't depend on the order of
// atomic additions.
inline uint mass_of(float l, float top, float inverse_sum) { return (uint)(exp(l - top) * inverse_sum * 0x1p31f + 0.5f); }

#if FILTERS
// The order of logits: from the largest, or from the nearest to `center` if that is a number.
inline float rank_of(const float l, const float center) { return isnan(center) ? l : -fabs(l - center); }
#define RANK_PARAMETERS , const bool runs, const float center
#define FIRST_SHIFT (runs ? 24 : -8)
#define RANK_KEY(l) key_of(rank_of(l, center))
#define LEFT_OUT(l, key) (key_of(l) < floor_key || l > top)
#else
#define RANK_PARAMETERS
#define FIRST_SHIFT 24
#define RANK_KEY(l) key_of(l)
#define LEFT_OUT(l, key) (key < floor_key)
#endif

// The largest key t for which the measure of { key >= t } reaches `target` or the whole, found digit by digit from the top
// (radix selection). A set's measure is its count, or with by_mass the mass of its members at or above `floor_key`.
// With FILTERS, members above `top` are left out, too, and the key belongs to rank_of(l, center).
inline uint radix_threshold(__global const float2* candidates, const int n, const bool by_mass, uint target,
                            const uint floor_key, const float top, const float inverse_sum, __local uint* histogram,
                            __local uint* found, const int lid RANK_PARAMETERS) {
    uint prefix = 0, above = 0;
    for (int shift = FIRST_SHIFT; shift >= 0; shift -= 8) {
        for (int i = lid; i < 256; i += LOCAL_SIZE) histogram[i] = 0;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int i = lid; i < n; i += LOCAL_SIZE) {
            const float l = candidates[i].x;
            const uint key = RANK_KEY(l);
            if (LEFT_OUT(l, key) || (shift < 24 && key >> (shift + 8) != prefix)) continue;
            atomic_add(histogram + ((key >> shift) & 255u), by_mass ? mass_of(l, top, inverse_sum) : 1u);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int block = lid; block < 16; block += LOCAL_SIZE) {
            uint sum = 0;
            for (int i = 0; i < 16; ++i) sum += histogram[16 * block + i];
            found[block] = sum;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid == 0) {
            if (shift == 24) {
                uint whole = 0;
                for (int i = 0; i < 16; ++i) whole += found[i];
                target = min(target, whole);
            }
            int block = 15;
            ROLLED while (block > 0 && above + found[block] < target) above += found[block--];
            int digit = 16 * block + 15;
            ROLLED while (digit > 16 * block && above + histogram[digit] < target) above += histogram[digit--];
            found[16] = digit;
            found[17] = above;
            found[18] = target;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        prefix = (prefix << 8) | found[16];
        above = found[17];
        target = found[18];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    return prefix;
}
#define FOUND 19  // radix_threshold's local words beside the histogram

#if FILTERS
#include "portable/survivors.cl"
#else
// The survivors, from the candidates alone: logits at or above the threshold.
typedef struct {
    float low, temperature;
} Survivors;
#define SURVIVES(l, survivors) ((l) >= (survivors).low)

inline float threshold_of(__global const float2* candidates, const int n, __global const int* sampling,
                          __global const float2* best, __local uint* histogram, __local uint* found,
                          __local ulong* scratch) {
    const int lid = get_local_id(0);
    const float top_p = as_float(sampling[SAMPLING_TOP_P]), min_p = as_float(sampling[SAMPLING_MIN_P]);
    __local float* floats = (__local float*)scratch;
    const float top = top_of(best, floats, lid);
    const float sum_of_all = whole_sum(best, top, 1.0f, floats, lid);
    uint key = 0;
    // Top-k, then top-p, if requested. Loop passes instead of branches, for the same reason as in lowest_bin.
    for (int pass = measures_count(sampling) ? 0 : 1; pass < (top_p < 1.0f ? 2 : 1); ++pass) {
        const bool by_mass = pass == 1;
        ulong units = 0;  // an integer, because candidate order varies
        for (int i = by_mass ? lid : n; i < n; i += LOCAL_SIZE)
            if (key_of(candidates[i].x) >= key) units += (ulong)(exp(candidates[i].x - top) * 0x1p40f);
        const float sum_of_candidates = (float)reduce_sum_ulong(units, scratch, lid) * 0x1p-40f;
        const float sum = key == 0 ? sum_of_all : sum_of_candidates;
        const uint target = by_mass ? max(1u, (uint)ceil(top_p * 0x1p31f)) : (uint)sampling[SAMPLING_TOP_K];
        key = max(key, radix_threshold(candidates, n, by_mass, target, key, top, 1.0f / sum, histogram, found, lid));
    }
    float threshold = key == 0 ? -INFINITY : value_of(key);
    if (min_p > 0.0f) threshold = fmax(threshold, top + log(min_p));
    return fmin(threshold, top);
}

inline Survivors survivors_of(__global const float2* candidates, const int n, __global const int* sampling,
                              __global const float2* best, const uint2 keys, __local uint* histogram, __local uint* found,
                              __local ulong* scratch) {
    Survivors survivors;
    survivors.low = threshold_of(candidates, n, sampling, best, histogram, found, scratch);
    survivors.temperature = as_float(sampling[SAMPLING_TEMPERATURE]);
    return survivors;
}
#endif

#ifdef RECORDS
#define BINS_OF_ROW bins += row * (BINS + 1);
#define CANDIDATES_OF_ROW candidates += (size_t)row * VOCAB;
#else
#define BINS_OF_ROW
#define CANDIDATES_OF_ROW
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void sample_threshold_histogram(__global const float* logits, __global const int* last_seen, __global const int* counts,
                                __global const int* state, __global const int* sampling, __global float2* best,
                                __global uint* bins) {
    __local uint own[BINS];
    __local float scratch[LOCAL_SIZE];
    OF_ROW(CHOICE) LOGITS_OF_ROW BINS_OF_ROW
    histogram_of_partition(get_group_id(0), logits, last_seen, counts, state, sampling, best, bins, own, scratch);
}

#define BLOCK_FLOATS (LOCAL_SIZE > BINS / BLOCK ? LOCAL_SIZE : BINS / BLOCK)

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void sample_threshold_candidates(__global const float* logits, __global const int* last_seen, __global const int* counts,
                                 __global const int* state, __global const int* sampling, __global const float2* best,
                                 __global uint* bins, __global float2* candidates) {
    __local float measures[BINS], scratch[BLOCK_FLOATS];
    __local int found;
    OF_ROW(CHOICE) LOGITS_OF_ROW BINS_OF_ROW CANDIDATES_OF_ROW
    candidates_of_partition(get_group_id(0), logits, last_seen, counts, state, sampling, best, bins, candidates, measures, scratch, &found);
}

// Writes sampling[SAMPLING_THRESHOLD], and the best-scoring token among the survivors. One group.
__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void sample_threshold_select(__global const float2* candidates, __global const float2* best, __global uint* bins,
                             __global int* sampling, __global int* state, __global int* tokens, __global int* sampled,
                             __global int* counts) {
    __local ulong scratch[LOCAL_SIZE];
    __local uint histogram[256], found[FOUND];
    OF_ROW(CHOICE) BINS_OF_ROW CANDIDATES_OF_ROW
    const int lid = get_local_id(0), n = bins[BINS];
    const uint2 keys = noise_keys(sequence_state(state, row), sampling);
    const Survivors survivors = survivors_of(candidates, n, sampling, best, keys, histogram, found, scratch);
    float score = -INFINITY;
    int token = VOCAB;
    for (int i = lid; i < n; i += LOCAL_SIZE) {
        const float l = candidates[i].x;
        const int candidate = as_int(candidates[i].y);
        if (SURVIVES(l, survivors)) keep_better(&score, &token, score_of(l, candidate, survivors.temperature, keys), candidate);
    }
    const float2 chosen = reduce_best((float2)(score, as_float(token)), (__local float2*)scratch, lid);
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);  // all reads are done before the writes
    for (int i = lid; i <= BINS; i += LOCAL_SIZE) bins[i] = 0;
    if (lid == 0) {
        sampling[SAMPLING_THRESHOLD] = as_int(survivors.low);
#if FILTERS
        write_filters(sampling, survivors, chosen, keys);
#endif
        end_step(chosen, row, sampling, state, tokens, sampled, counts);
    }
}

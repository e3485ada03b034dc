// Applies the user functions and the mask to a lane's scores (attention_mods.cl), for fragments of the matrix units.
//
// score_mod is SCORE_FACTOR f(SCORE_UNIT score), where f is FRAGMENT_MOD_BODY: the constants are merged into existing factors of
// the scores. With HAS_KEY_SLOPE, f adds a term to the score that grows by a constant from key to key in a row, as ALiBi does.
// KEY_SLOPE_BODY gives the rows' slopes, a lane's score costs one multiply-add, and the softmax adds the term of the lane's first
// key (row_terms). With SCORE_MOD_ARRAYS f reads arrays, which have no element for keys past the last key: f is compiled a second
// time for tiles with such keys.
//
// tanh: if all arguments in 8 scores are near 0, as under a soft cap, a polynomial is enough, without special functions, which run
// at an eighth of the rate; otherwise tanh1 in common.cl computes the 8 scores again. With QUICK_TANH the device's tanh is used,
// with a relative error of 2^-11, as for a score rounded to float16.

#define NEAR_0 0.75f
#define FRAGMENT_SCORES 8  // 16 keys and two rows

#ifndef QUICK_TANH
#define QUICK_TANH 0
#endif
#ifndef HAS_KEY_SLOPE
#define HAS_KEY_SLOPE 0
#endif
#ifndef FRAGMENT_MOD_BODY
#define FRAGMENT_MOD_BODY SCORE_MOD_BODY
#define SCORE_MOD_ARRAYS 1  // assume arrays
#define SCORE_UNIT 1.0f
#define SCORE_FACTOR 1.0f
#endif
#if HAS_SCORE_MOD && QUICK_TANH
inline float near_tanh(const float x, float* largest) {
    float r;
    asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
#elif HAS_SCORE_MOD
// tanh(x) as x + x^3 P(x^2), P minimax. Relative error below 1.1e-7 for |x| < NEAR_0.
inline float near_tanh(const float x, float* largest) {
    const float y = x * x;
    float p = y * -4.76948991e-3f + 1.96649131e-2f;
    p = p * y - 5.33902584e-2f;
    p = p * y + 0.133265212f;
    p = p * y - 0.333330684f;
    *largest = fmax(*largest, fabs(x));
    return x + x * (y * p);
}
#endif

#if HAS_SCORE_MOD
inline float fragment_mod(const float score, const int b, const int h, const int q_idx, const int kv_idx MOD_PARAMS) FRAGMENT_MOD_BODY
// The same function, if no tanh argument exceeds NEAR_0; *largest becomes the largest argument.
#undef TANH
#define TANH(x) near_tanh(x, largest)
inline float near_fragment_mod(const float score, const int b, const int h, const int q_idx, const int kv_idx,
                               float* largest MOD_PARAMS) FRAGMENT_MOD_BODY
#undef TANH
#define TANH tanh1
#endif
#if HAS_KEY_SLOPE
inline float key_slope(const int b, const int h, const int q_idx MOD_PARAMS) KEY_SLOPE_BODY
#endif

// For a lane's two rows: the slope of the scores from key to key, and the term to add to all scores.
typedef struct {
    float slope[2], bias[2];
} row_terms;

// Returns the terms for scores in `unit`, for keys from `first` on.
inline row_terms terms_of(const float unit, const int batch, const int head, const int rows[2], const int first MOD_PARAMS) {
    row_terms terms = {{0.0f, 0.0f}, {0.0f, 0.0f}};
#if HAS_KEY_SLOPE
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        terms.slope[h] = key_slope(batch, head, rows[h] MOD_ARGS) * (1.0f / unit);
        terms.bias[h] = fragment_mod(0.0f, batch, head, rows[h], first MOD_ARGS) * (1.0f / unit);
    }
#endif
    return terms;
}

// s[i] times `unit` is f's input score, for query rows[i / 2 % 2] and key `first` + i / 4 * 8 + i % 2. s[i] becomes the modified
// score times `factor`; with HAS_KEY_SLOPE in the old units and without the bias in `terms`.
#define Q_IDX rows[i / 2 % 2]
#define KEYS_ON (i / 4 * 8 + i % 2)
#define KV_IDX (first + KEYS_ON)
#define SEEN_KV_IDX min(KV_IDX, last)  // an existing key: user arrays have no element for other keys
#if HAS_KEY_SLOPE
inline void score_lanes(float* s, const int count, const row_terms terms) {
#pragma unroll
    for (int i = 0; i < count; ++i) s[i] = fma(terms.slope[i / 2 % 2], (float)KEYS_ON, s[i]);
}
#define SCORE_LANES(name) score_lanes(s, count, terms)
#elif HAS_SCORE_MOD
#define DEFINE_SCORE_LANES(name, KEY)                                                                                      \
    inline void name(float* s, const int count, const float unit, const float factor, const int batch, const int head,    \
                     const int rows[2], const int first, const int last MOD_PARAMS) {                                     \
        _Pragma("unroll") for (int at = 0; at < count; at += FRAGMENT_SCORES) {                                            \
            /* Of hidden keys, too: a branch for each would cost more. */                                                 \
            float modified[FRAGMENT_SCORES], largest = 0.0f;                                                               \
            _Pragma("unroll") for (int i = at; i < at + FRAGMENT_SCORES; ++i)                                              \
                modified[i - at] = near_fragment_mod(s[i] * unit, batch, head, Q_IDX, KEY, &largest MOD_ARGS);            \
            if (!QUICK_TANH && largest >= NEAR_0) {                                                                        \
                _Pragma("unroll") for (int i = at; i < at + FRAGMENT_SCORES; ++i)                                          \
                    modified[i - at] = fragment_mod(s[i] * unit, batch, head, Q_IDX, KEY MOD_ARGS);                       \
            }                                                                                                              \
            _Pragma("unroll") for (int i = at; i < at + FRAGMENT_SCORES; ++i) s[i] = modified[i - at] * factor;            \
        }                                                                                                                  \
    }
DEFINE_SCORE_LANES(score_lanes, KV_IDX)
#ifdef SCORE_MOD_ARRAYS
DEFINE_SCORE_LANES(score_lanes_to_last, SEEN_KV_IDX)
#endif
#define SCORE_LANES(name) name(s, count, unit, factor, batch, head, rows, first, last MOD_ARGS)
#else
#define SCORE_LANES(name)
#endif

// Also sets scores of keys hidden from a query to -infinity. Keys before `end` exist, and the queries see them as far as seen_as
// (TILE_*) and, without KV_BLOCK_RANGES, their position allow; whole: they see all `count` keys.
inline void modify_scores(float* s, const int count, const row_terms terms, const float unit, const float factor, const int batch,
                          const int head, const int rows[2], const int first, const int end, const int seen_as,
                          const bool whole MOD_PARAMS) {
    const int last = max(end - 1, 0);
#ifdef SCORE_MOD_ARRAYS
    if (whole) {
        SCORE_LANES(score_lanes);
        return;
    }
    SCORE_LANES(score_lanes_to_last);
#else
    SCORE_LANES(score_lanes);
    if (whole) return;
#endif
#if HAS_MASK_MOD
    if (seen_as == TILE_PARTIAL) {
#pragma unroll
        for (int i = 0; i < count; ++i)
            if (!mask_mod(batch, head, Q_IDX, SEEN_KV_IDX MOD_ARGS)) s[i] = -INFINITY;
    }
#endif
#pragma unroll
    for (int i = 0; i < count; ++i)
        if (KV_BLOCK_RANGES ? KV_IDX >= end : KV_IDX > Q_IDX) s[i] = -INFINITY;
}
#undef Q_IDX
#undef KEYS_ON
#undef KV_IDX
#undef SEEN_KV_IDX
#undef SCORE_LANES

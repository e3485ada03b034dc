// What the user's functions and the mask make of the scores that a lane has (attention_mods.cl), for fragments of the matrix units.
//
// score_mod is SCORE_FACTOR f(SCORE_UNIT score), f being FRAGMENT_MOD_BODY: the constants go into factors that scores have anyway.
// With HAS_KEY_SLOPE f adds to its score what grows by the same amount from key to key in a row, as ALiBi does: then the rows'
// amounts are KEY_SLOPE_BODY, a lane's score costs one multiply-add, and what its first key is given is left to the softmax
// (row_terms). With SCORE_MOD_ARRAYS it looks up arrays, which have no element for keys past the last one: it is compiled once more
// for tiles that have such keys.
//
// tanh: where all of its arguments in 8 scores are near 0, as those of a soft cap are, a polynomial does, and none of the special
// functions that run at an eighth of the rate; otherwise the 8 are computed anew with tanh1 of common.cl. With QUICK_TANH it is the
// device's own, of a relative error of 2^-11: that of a score rounded to float16.

#define NEAR_0 0.75f
#define FRAGMENT_SCORES 8  // of 16 keys and two rows

#ifndef QUICK_TANH
#define QUICK_TANH 0
#endif
#ifndef HAS_KEY_SLOPE
#define HAS_KEY_SLOPE 0
#endif
#ifndef FRAGMENT_MOD_BODY
#define FRAGMENT_MOD_BODY SCORE_MOD_BODY
#define SCORE_MOD_ARRAYS 1  // for all that is known
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
// The same if no tanh in it is asked for more than NEAR_0; *largest becomes the largest that it is asked for.
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

// Of a lane's two rows: what their scores grow by from key to key, and what is to be added to all of their scores.
typedef struct {
    float slope[2], bias[2];
} row_terms;

// Of scores that `unit` makes those that f has, for keys from `first` on.
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

// s[i] times `unit` is the score, as f takes it, of query rows[i / 2 % 2] and of key `first` + i / 4 * 8 + i % 2; becomes the
// modified one times `factor`, with HAS_KEY_SLOPE in its old units and without the bias of `terms`.
#define Q_IDX rows[i / 2 % 2]
#define KEYS_ON (i / 4 * 8 + i % 2)
#define KV_IDX (first + KEYS_ON)
#define SEEN_KV_IDX min(KV_IDX, last)  // of a key that exists: arrays of the user's have no element for others
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

// The same, and -infinity for keys that a query does not see. Keys before `end` exist, and the queries see them as far as
// seen_as (TILE_*) and without KV_BLOCK_RANGES their position say; whole: they see all `count` of them.
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

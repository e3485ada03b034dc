// What the user's functions and the mask make of the scores that a lane has (attention_mods.cl), for fragments of the matrix units.
//
// tanh: where all of its arguments in 8 scores are near 0, as those of a soft cap are, a polynomial does, and none of the special
// functions that run at an eighth of the rate; otherwise the 8 are computed anew with tanh1 of common.cl. With QUICK_TANH it is the
// device's own, of a relative error of 2^-11: that of a score rounded to float16.

#define NEAR_0 0.75f
#define FRAGMENT_SCORES 8  // of 16 keys and two rows

#ifndef QUICK_TANH
#define QUICK_TANH 0
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
// score_mod if no tanh in it is asked for more than NEAR_0; *largest becomes the largest that it is asked for.
#undef TANH
#define TANH(x) near_tanh(x, largest)
inline float near_score_mod(const float score, const int b, const int h, const int q_idx, const int kv_idx,
                            float* largest MOD_PARAMS) SCORE_MOD_BODY
#undef TANH
#define TANH tanh1
#endif

// s[i] times `unit` is the score of query rows[i / 2 % 2] and of key `first` + i / 4 * 8 + i % 2; becomes the modified one.
#define Q_IDX rows[i / 2 % 2]
#define KV_IDX (first + i / 4 * 8 + i % 2)
#define SEEN_KV_IDX min(KV_IDX, last)  // of a key that exists: arrays of the user's have no element for others
#if HAS_SCORE_MOD
#define DEFINE_SCORE_LANES(name, KEY)                                                                                   \
    inline void name(float* s, const int count, const float unit, const int batch, const int head, const int rows[2],  \
                     const int first, const int last MOD_PARAMS) {                                                      \
        _Pragma("unroll") for (int at = 0; at < count; at += FRAGMENT_SCORES) {                                             \
            /* Of hidden keys, too: a branch for each would cost more. */                                               \
            float modified[FRAGMENT_SCORES], largest = 0.0f;                                                                \
            _Pragma("unroll") for (int i = at; i < at + FRAGMENT_SCORES; ++i)                                               \
                modified[i - at] = near_score_mod(s[i] * unit, batch, head, Q_IDX, KEY, &largest MOD_ARGS);             \
            if (largest >= NEAR_0) {                                                                                    \
                _Pragma("unroll") for (int i = at; i < at + FRAGMENT_SCORES; ++i)                                           \
                    modified[i - at] = score_mod(s[i] * unit, batch, head, Q_IDX, KEY MOD_ARGS);                        \
            }                                                                                                           \
            _Pragma("unroll") for (int i = at; i < at + FRAGMENT_SCORES; ++i) s[i] = modified[i - at];                      \
        }                                                                                                               \
    }
DEFINE_SCORE_LANES(score_lanes, KV_IDX)
DEFINE_SCORE_LANES(score_lanes_to_last, SEEN_KV_IDX)
#endif

// The same, and -infinity for keys that a query does not see. Keys before `end` exist, and the queries see them as far as
// seen_as (TILE_*) and without KV_BLOCK_RANGES their position say; whole: they see all `count` of them.
inline void modify_scores(float* s, const int count, const float unit, const int batch, const int head, const int rows[2],
                          const int first, const int end, const int seen_as, const bool whole MOD_PARAMS) {
    const int last = max(end - 1, 0);
    if (whole) {
#if HAS_SCORE_MOD
        score_lanes(s, count, unit, batch, head, rows, first, last MOD_ARGS);
#endif
        return;
    }
#if HAS_SCORE_MOD
    score_lanes_to_last(s, count, unit, batch, head, rows, first, last MOD_ARGS);
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
#undef KV_IDX
#undef SEEN_KV_IDX

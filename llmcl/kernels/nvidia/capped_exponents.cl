// Exponents of softmax weights under a soft cap: the score_mod is SCORE_FACTOR tanh(SCORE_UNIT score) and nothing else
// (HAS_SOFT_CAP, fragment_scores.cl).
//
// It grows with the score. So a row's largest score is looked for before the cap, and tanh and exponential of a score follow each
// other without a maximum between them. A special function (tanh, ex2) takes a scheduler 8 cycles a warp, a multiply-add one, so
// that tanh is a polynomial. For x = SCORE_UNIT score, |x| < NEAR_CAP,
//
//     tanh(x) = x (c0 + c1 x^2 + c2 x^4)          minimax, of a relative error below 2^-12.1.
//
// Beyond, the polynomial is larger in size and has the sign of x. Of a row only the largest score is tested: it must be below
// NEAR_CAP, and so far above -NEAR_CAP that keys below that have negligible weights, as they should or smaller. Where a row of the
// warp is otherwise, quick_tanh computes all (the device's own, of a relative error of 2^-11: that of a score rounded to float16).
//
// Before it: SCORE_SCALE (the scale and SCORE_UNIT), SCALED_FIRST (whether scores have it already), LOG2E, quick_tanh(float).
#define NEAR_CAP 0.75f
#define TANH_NEAR_CAP 0.635f
#define NEGLIGIBLE 17.0f  // exp(-17) is less than the least float16
#define LEAST_TANH (NEGLIGIBLE / SCORE_FACTOR - TANH_NEAR_CAP)  // of a row's largest score

#define CAP_UNIT (SCALED_FIRST ? 1.0f : SCORE_SCALE)  // that x has of a score s
#define CAP_EXPONENT (SCORE_FACTOR * LOG2E)  // that tanh(x) is to have
#define LEAST_EXPONENT (LEAST_TANH * CAP_EXPONENT)
#define CAP_SQUARE (CAP_UNIT * CAP_UNIT)
#define CAP_TERM0 0.9997852f
#define CAP_TERM1 -0.32629672f
#define CAP_TERM2 0.09735547f
#define CAP_C0 (CAP_EXPONENT * CAP_UNIT * CAP_TERM0)  // of s, s^3 and s^5
#define CAP_C1 (CAP_EXPONENT * CAP_UNIT * CAP_SQUARE * CAP_TERM1)
#define CAP_C2 (CAP_EXPONENT * CAP_UNIT * CAP_SQUARE * CAP_SQUARE * CAP_TERM2)
#define CAP_FITS (CAP_C2 > 1e-37f)  // for larger caps it is no normal number

// CAP_EXPONENT tanh(x) - from, x being near the cap; of a hidden key, whose score is -infinity, that.
inline float near_exponent(const float s, const float from) {
    const float y = s * s;
    const float p = fma(y, CAP_C2, CAP_C1);
    return fma(s, fma(y, p, CAP_C0), -from);
}
inline float far_exponent(const float s, const float from) {
    const float exponent = fma(quick_tanh(s * CAP_UNIT), CAP_EXPONENT, -from);
    return s == -INFINITY ? s : exponent;
}

// Whether near_exponent does for two rows. top: the largest of their scores; last: the largest exponents before; m becomes those of
// both, and is to be `least` or more.
inline bool near_cap(float m[2], const float last[2], const float top[2], const float least) {
    bool near = CAP_FITS;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        m[h] = fmax(last[h], near_exponent(top[h], 0.0f));
        near = near && top[h] < NEAR_CAP / CAP_UNIT && m[h] >= fmax(least, LEAST_EXPONENT);
    }
    return near;
}

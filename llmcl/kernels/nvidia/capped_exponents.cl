// Exponents of softmax weights under a soft cap: the score_mod is exactly SCORE_FACTOR tanh(SCORE_UNIT score) (HAS_SOFT_CAP,
// fragment_scores.cl).
//
// The capped score grows with the score. A row's largest score can therefore be found before the cap, and tanh and exponential of a
// score need no maximum in between. A special function (tanh, ex2) takes a scheduler 8 cycles per warp, a multiply-add takes 1
// cycle: tanh is therefore a polynomial. For x = SCORE_UNIT score, |x| < NEAR_CAP,
//
//     tanh(x) = x (c0 + c1 x^2 + c2 x^4)          minimax, with a relative error below 2^-12.1.
//
// Beyond NEAR_CAP, the polynomial is larger than tanh in magnitude and has the sign of x. Only the largest score in a row is
// tested: it must be below NEAR_CAP, and far enough above -NEAR_CAP to make the weights of keys below -NEAR_CAP negligible, as they
// should be or smaller. If a row fails, the warp uses quick_tanh for all (the device's tanh; relative error 2^-11, like float16).
//
// Define before: SCORE_SCALE (the scale and SCORE_UNIT), SCALED_FIRST (scores already include SCORE_SCALE), LOG2E, quick_tanh(float).
#define NEAR_CAP 0.75f
#define TANH_NEAR_CAP 0.635f
#define NEGLIGIBLE 17.0f  // exp(-17) is less than the smallest float16
#define LEAST_TANH (NEGLIGIBLE / SCORE_FACTOR - TANH_NEAR_CAP)  // for a row's largest score

#define CAP_UNIT (SCALED_FIRST ? 1.0f : SCORE_SCALE)  // x per score s
#define CAP_EXPONENT (SCORE_FACTOR * LOG2E)  // factor for tanh(x)
#define LEAST_EXPONENT (LEAST_TANH * CAP_EXPONENT)
#define CAP_SQUARE (CAP_UNIT * CAP_UNIT)
#define CAP_TERM0 0.9997852f
#define CAP_TERM1 -0.32629672f
#define CAP_TERM2 0.09735547f
#define CAP_C0 (CAP_EXPONENT * CAP_UNIT * CAP_TERM0)  // for s, s^3 and s^5
#define CAP_C1 (CAP_EXPONENT * CAP_UNIT * CAP_SQUARE * CAP_TERM1)
#define CAP_C2 (CAP_EXPONENT * CAP_UNIT * CAP_SQUARE * CAP_SQUARE * CAP_TERM2)
#define CAP_FITS (CAP_C2 > 1e-37f)  // for larger caps CAP_C2 is subnormal

// Returns CAP_EXPONENT tanh(x) - from, for x near the cap; -infinity for a hidden key, whose score is -infinity.
inline float near_exponent(const float s, const float from) {
    const float y = s * s;
    const float p = fma(y, CAP_C2, CAP_C1);
    return fma(s, fma(y, p, CAP_C0), -from);
}
inline float far_exponent(const float s, const float from) {
    const float exponent = fma(quick_tanh(s * CAP_UNIT), CAP_EXPONENT, -from);
    return s == -INFINITY ? s : exponent;
}

// Tells whether near_exponent is accurate for two rows. top: their largest scores; last: the largest exponents so far; m becomes
// the maximum of both, and must be `least` or more.
inline bool near_cap(float m[2], const float last[2], const float top[2], const float least) {
    bool near = CAP_FITS;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        m[h] = fmax(last[h], near_exponent(top[h], 0.0f));
        near = near && top[h] < NEAR_CAP / CAP_UNIT && m[h] >= fmax(least, LEAST_EXPONENT);
    }
    return near;
}

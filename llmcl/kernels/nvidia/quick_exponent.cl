// Exponentials from the special function unit: the error is far below the rounding of a softmax weight to 16 bits.
#define LOG2E 1.4426950408889634f

inline float exp2_quick(const float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// softmax_weight in online_softmax.cl, without a branch.
inline float quick_weight(const float score, const float m) {
    return exp2_quick((score - (m == -INFINITY ? 0.0f : m)) * LOG2E);
}

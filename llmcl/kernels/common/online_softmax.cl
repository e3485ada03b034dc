// The online-softmax state of one query: m (largest score), l (sum of exp(score - m)), acc (sum of exp(score - m) V).
//
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). Merging two states a, b:
//   m = max(a.m, b.m);  l = a.l exp(a.m - m) + b.l exp(b.m - m);  acc likewise;  out = acc / l.
// An empty state has m = -inf, l = 0; its weight is 0, never exp(-inf - -inf) = NaN.

inline float softmax_weight(float m_part, float m_whole) {
    return m_part == -INFINITY ? 0.0f : exp(m_part - m_whole);
}

// A query that sees no key gets output 0.
inline float softmax_norm(float l) { return l > 0.0f ? 1.0f / l : 0.0f; }

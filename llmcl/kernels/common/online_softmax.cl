// The online-softmax state of a query: m (largest score), l (sum of exp(score - m)), acc (sum of exp(score - m) V).
//
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). Merging two states a, b:
//   m = max(a.m, b.m);  l = a.l exp(a.m - m) + b.l exp(b.m - m);  acc likewise;  out = acc / l.
// An empty state has m = -inf, l = 0 and weight 0, never exp(-inf - -inf) = NaN.

inline float softmax_weight(float m_part, float m_whole) {
    return m_part == -INFINITY ? 0.0f : exp(m_part - m_whole);
}

// A query that sees no key gets output 0 and log-sum -inf. NaN stays NaN.
inline float softmax_norm(float l) { return l == 0.0f ? 0.0f : 1.0f / l; }
inline float softmax_log_sum(float m, float l) { return l == 0.0f ? -INFINITY : m + log(l); }

// A sink is a learned logit per query head without a key (OpenAI, "gpt-oss", 2025): a state with m = sink, l = 1, acc = 0, added
// once to the total. Enabled by HAS_SINKS; a kernel then has the argument sinks, float [query heads].
#ifndef HAS_SINKS
#define HAS_SINKS 0
#endif
#if HAS_SINKS
#define SINKS_PARAM , __global const float* sinks
#define SINKS_ARG , sinks
// exp may be infinite if a query's keys are negligible beside the sink.
inline float sink_norm(float m, float l, float sink) { return m == -INFINITY ? 0.0f : 1.0f / (l + exp(sink - m)); }
inline float sink_log_sum(float m, float l, float sink) {
    const float top = fmax(m, sink);
    return top + log(softmax_weight(m, top) * l + softmax_weight(sink, top));
}
#define SINK(head) sinks[head]
#define OUTPUT_NORM(m, l, head) sink_norm(m, l, sinks[head])
#define LOG_SUM(m, l, head) sink_log_sum(m, l, sinks[head])
#else
#define SINKS_PARAM
#define SINKS_ARG
#define SINK(head) (-INFINITY)
#define OUTPUT_NORM(m, l, head) softmax_norm(l)
#define LOG_SUM(m, l, head) softmax_log_sum(m, l)
#endif

// With MAX_SCORES a kernel has the argument max_scores, float, indexed like lse: the largest score among the keys seen by the
// query, -inf if there are none.
#ifndef MAX_SCORES
#define MAX_SCORES 0
#endif
#if MAX_SCORES
#define MAX_SCORES_PARAM , __global float* max_scores
#define MAX_SCORES_ARG , max_scores
#define KEEP_MAX_SCORE(place, m) max_scores[place] = m
#else
#define MAX_SCORES_PARAM
#define MAX_SCORES_ARG
#define KEEP_MAX_SCORE(place, m)
#endif

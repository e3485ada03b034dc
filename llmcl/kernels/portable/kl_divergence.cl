// Compares rows of logits on the device: out[t] = (KL(P || Q), [argmax P = argmax Q])
// with P = softmax(reference[t]), Q = softmax(logits[t]), KL = sum_i P_i (log P_i - log Q_i); the argmax is the lower
// index on ties.
//
// reference, logits  float [n][VOCAB]      out  float2 [n]
// Index space: a work-group per row, local size LOCAL_SIZE; a work-item takes every LOCAL_SIZE-th 8-logit piece, then every
// LOCAL_SIZE-th of the remaining VOCAB % 8 logits.
// Build: VOCAB, LOCAL_SIZE (a power of two). Local memory: 8 LOCAL_SIZE bytes.
// Float32 sums in 8 LOCAL_SIZE strands; out within 1e-5 of float64 absolutely (VOCAB 128256: 3e-5),
// plus 1e-6 of its magnitude.
#if !defined(VOCAB) || !defined(LOCAL_SIZE)
#error "kl_divergence.cl needs the build constants VOCAB, LOCAL_SIZE"
#endif
#include "portable/log_softmax.cl"

inline int reduce_min(const int v, __local int* scratch, const int lid) REDUCED(int, min)

inline int first_index_of(__global const float* row, const float value, __local int* scratch, const int lid) {
    int found = VOCAB;
    for (int i = lid; i < PIECES && found == VOCAB; i += LOCAL_SIZE)
        if (any(vload8(i, row) == value))
            for (found = 8 * i; row[found] != value;) ++found;
    for (int i = TAIL + lid; i < VOCAB && found == VOCAB; i += LOCAL_SIZE)
        if (row[i] == value) found = i;
    return reduce_min(found, scratch, lid);
}

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void kl_divergence(__global const float* reference, __global const float* logits, __global float2* out) {
    __local float scratch[LOCAL_SIZE];
    __local int indices[LOCAL_SIZE];
    const int lid = get_local_id(0), t = get_group_id(0);
    reference += (size_t)t * VOCAB;
    logits += (size_t)t * VOCAB;
    const float top_p = row_top(reference, scratch, lid), top_q = row_top(logits, scratch, lid);
    // Not added to the tops: logits far from zero would round the sum.
    const float log_p = log_sum(reference, top_p, scratch, lid), log_q = log_sum(logits, top_q, scratch, lid);

    float8 sums = 0.0f;
    for (int i = lid; i < PIECES; i += LOCAL_SIZE) {
        const float8 p = vload8(i, reference) - top_p - log_p;
        sums += exp(p) * (p - (vload8(i, logits) - top_q - log_q));
    }
    float sum = sum8(sums);
    for (int i = TAIL + lid; i < VOCAB; i += LOCAL_SIZE) {
        const float p = reference[i] - top_p - log_p;
        sum += exp(p) * (p - (logits[i] - top_q - log_q));
    }
    sum = reduce_sum(sum, scratch, lid);
    const int best_p = first_index_of(reference, top_p, indices, lid);
    const int best_q = first_index_of(logits, top_q, indices, lid);
    if (lid == 0) out[t] = (float2)(sum, best_p == best_q ? 1.0f : 0.0f);
}

// Evaluates rows of logits on the device: out[t] = log softmax(logits[t])[targets[t]]
//
// logits  float [n][VOCAB]      targets  int [n], each in [0, VOCAB)      out  float [n]
// Index space: a work-group per row, local size LOCAL_SIZE; a work-item takes every LOCAL_SIZE-th 8-logit piece, then every
// LOCAL_SIZE-th of the remaining VOCAB % 8 logits.
// Build: VOCAB, LOCAL_SIZE (a power of two). Local memory: 4 LOCAL_SIZE bytes.
// Float32 sums in 8 LOCAL_SIZE strands; out within 1e-5 of float64 absolutely (VOCAB 128256: 3e-5),
// plus 1e-6 of its magnitude.
#if !defined(VOCAB) || !defined(LOCAL_SIZE)
#error "log_likelihood.cl needs the build constants VOCAB, LOCAL_SIZE"
#endif
#include "portable/log_softmax.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void log_likelihood(__global const float* logits, __global const int* targets, __global float* out) {
    __local float scratch[LOCAL_SIZE];
    const int lid = get_local_id(0), t = get_group_id(0);
    logits += (size_t)t * VOCAB;
    const float top = row_top(logits, scratch, lid);
    const float sum = log_sum(logits, top, scratch, lid);
    if (lid == 0) out[t] = logits[targets[t]] - top - sum;
}

// The parts of a row's log softmax: the largest logit, and the logarithm of the sum. A work-group takes a row of VOCAB logits.
#include "common/common.cl"
#include "common/reduce.cl"

#define PIECES (VOCAB / 8)
#define TAIL (PIECES * 8)

inline float sum8(float8 v) {
    const float4 a = v.lo + v.hi;
    const float2 b = a.lo + a.hi;
    return b.x + b.y;
}

inline float top8(float8 v) {
    const float4 a = fmax(v.lo, v.hi);
    const float2 b = fmax(a.lo, a.hi);
    return fmax(b.x, b.y);
}

// log sum_i exp(row[i] - top), with top the row's maximum.
inline float log_sum(__global const float* row, const float top, __local float* scratch, const int lid) {
    float8 sums = 0.0f;
    for (int i = lid; i < PIECES; i += LOCAL_SIZE) sums += exp(vload8(i, row) - top);
    float sum = sum8(sums);
    for (int i = TAIL + lid; i < VOCAB; i += LOCAL_SIZE) sum += exp(row[i] - top);
    return log(reduce_sum(sum, scratch, lid));
}

inline float row_top(__global const float* row, __local float* scratch, const int lid) {
    float8 tops = -INFINITY;
    for (int i = lid; i < PIECES; i += LOCAL_SIZE) tops = fmax(tops, vload8(i, row));
    float top = top8(tops);
    for (int i = TAIL + lid; i < VOCAB; i += LOCAL_SIZE) top = fmax(top, row[i]);
    return reduce_max(top, scratch, lid);
}

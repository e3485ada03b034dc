// What some models do to a step's queries, keys and values between projection and rotation, in place:
//
//   with BIAS  x += bias          with HEAD_NORM  x = x / sqrt(mean(x^2) + EPS) * norm, for each query and key head
//   (Qwen2 has the first, Qwen3 the second: Yang et al., "Qwen3 Technical Report", 2025)
//   with VALUE_NORM, beside HEAD_NORM, each value head as well, without weights
//
// qkv   float [n][N_Q_HEADS + 2 N_KV_HEADS][HEAD_DIM]      bias   float [N_Q_HEADS + 2 N_KV_HEADS][HEAD_DIM]
// norms float [2][HEAD_DIM]: of query heads, of key heads
//
// Index space: groups (heads to adjust / HEADS_PER_GROUP, n) of LOCAL_SIZE; work-items share the pieces of 16 of a head.
// Build: N_Q_HEADS, N_KV_HEADS, HEAD_DIM (a multiple of 16), BIAS, HEAD_NORM, EPS, HEADS_PER_GROUP, LOCAL_SIZE (a power
// of two). Local memory: 4 LOCAL_SIZE bytes.
#if !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(HEAD_DIM) || !defined(BIAS) || !defined(HEAD_NORM) || \
    !defined(EPS) || !defined(HEADS_PER_GROUP) || !defined(LOCAL_SIZE)
#error "qkv_adjust.cl needs N_Q_HEADS, N_KV_HEADS, HEAD_DIM, BIAS, HEAD_NORM, EPS, HEADS_PER_GROUP, LOCAL_SIZE"
#endif
#include "common/common.cl"
#include "common/reduce.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void qkv_adjust(__global float* qkv, __global const float* bias, __global const float* norms) {
    LOCAL_SCRATCH(float, scratch);
    const int lid = get_local_id(0);
    qkv += (size_t)get_group_id(1) * (N_Q_HEADS + 2 * N_KV_HEADS) * HEAD_DIM;
    for (int j = 0; j < HEADS_PER_GROUP; ++j) {
        const int head = get_group_id(0) * HEADS_PER_GROUP + j;
        __global float* x = qkv + head * HEAD_DIM;
#if BIAS
        for (int i = lid * 16; i < HEAD_DIM; i += LOCAL_SIZE * 16)
            store16_f32(load16_f32(x + i) + load16_f32(bias + head * HEAD_DIM + i), x + i);
#endif
#if HEAD_NORM
#if !VALUE_NORM
        if (head >= N_Q_HEADS + N_KV_HEADS) continue;
#endif
        __global const float* norm = norms + (head < N_Q_HEADS ? 0 : HEAD_DIM);
        float16 squares = 0;
        for (int i = lid * 16; i < HEAD_DIM; i += LOCAL_SIZE * 16) {
            const float16 v = load16_f32(x + i);
            squares += v * v;
        }
        const float sum = reduce_sum(sum16(squares), scratch, lid);
        const float scale = 1.0f / sqrt(NO_OVERFLOW(sum) / HEAD_DIM + EPS);
#if VALUE_NORM
        if (head >= N_Q_HEADS + N_KV_HEADS) {
            for (int i = lid * 16; i < HEAD_DIM; i += LOCAL_SIZE * 16) store16_f32(load16_f32(x + i) * scale, x + i);
            continue;
        }
#endif
        for (int i = lid * 16; i < HEAD_DIM; i += LOCAL_SIZE * 16)
            store16_f32(load16_f32(x + i) * scale * load16_f32(norm + i), x + i);
#endif
    }
}

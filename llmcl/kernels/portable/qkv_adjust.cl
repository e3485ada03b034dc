// Adjusts a step's queries, keys and values between projection and rotation, in place, as some models require:
//
//   with BIAS  x += bias          with HEAD_NORM  x = x / sqrt(mean(x^2) + EPS) * norm, for each query and key head
//   (Qwen2 has the first, Qwen3 the second: Yang et al., "Qwen3 Technical Report", 2025)
//   with VALUE_NORM, beside HEAD_NORM, each value head as well, without weights
//   with ROTATE, beside HEAD_NORM, query and key heads are rotated before their norm (Hunyuan)
//
// qkv   float [n][N_Q_HEADS + 2 N_KV_HEADS][HEAD_DIM]      bias   float [N_Q_HEADS + 2 N_KV_HEADS][HEAD_DIM]
// norms float [2][HEAD_DIM]: query heads, key heads          rope   float [n][HEAD_DIM], with ROTATE: cosines, then sines
//
// Index space: groups (heads to adjust / (HEADS_PER_GROUP HEADS_AT_ONCE), n), local size LOCAL_SIZE HEADS_AT_ONCE; a head's work-item
// takes
// every LOCAL_SIZE-th 16-value piece.
// Build: N_Q_HEADS, N_KV_HEADS, HEAD_DIM (a multiple of 16), BIAS, HEAD_NORM, EPS, HEADS_PER_GROUP (in sequence), HEADS_AT_ONCE,
// LOCAL_SIZE (a power of two). Local memory: 4 LOCAL_SIZE HEADS_AT_ONCE bytes.
#if !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(HEAD_DIM) || !defined(BIAS) || !defined(HEAD_NORM) || \
    !defined(EPS) || !defined(HEADS_PER_GROUP) || !defined(HEADS_AT_ONCE) || !defined(LOCAL_SIZE)
#error "qkv_adjust.cl needs N_Q_HEADS, N_KV_HEADS, HEAD_DIM, BIAS, HEAD_NORM, EPS, HEADS_PER_GROUP, HEADS_AT_ONCE, LOCAL_SIZE"
#endif
#ifndef VALUE_NORM
#define VALUE_NORM 0
#endif
#ifndef ROTATE
#define ROTATE 0
#endif
#include "common/common.cl"
#include "common/reduce.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE * HEADS_AT_ONCE, 1, 1)))
void qkv_adjust(__global float* qkv, __global const float* bias, __global const float* norms
#if ROTATE
                , __global const float* rope
#endif
                ) {
    LOCAL_SCRATCHES(float, scratch, HEADS_AT_ONCE);
    const int lid = (int)get_local_id(0) % LOCAL_SIZE, place = (int)get_local_id(0) / LOCAL_SIZE;
    qkv += (size_t)get_group_id(1) * (N_Q_HEADS + 2 * N_KV_HEADS) * HEAD_DIM;
    for (int j = 0; j < HEADS_PER_GROUP; ++j) {
        const int head = (get_group_id(0) * HEADS_PER_GROUP + j) * HEADS_AT_ONCE + place;
        __global float* x = qkv + head * HEAD_DIM;
#if BIAS
        for (int i = lid * 16; i < HEAD_DIM; i += LOCAL_SIZE * 16)
            store16_f32(load16_f32(x + i) + load16_f32(bias + head * HEAD_DIM + i), x + i);
#if ROTATE
        barrier(CLK_GLOBAL_MEM_FENCE);  // the rotation reads pieces of other work-items
#endif
#endif
#if HEAD_NORM
        const bool has_norm = VALUE_NORM || head < N_Q_HEADS + N_KV_HEADS;
        float16 squares = 0;
        for (int i = lid * 16; has_norm && i < HEAD_DIM; i += LOCAL_SIZE * 16) {
            const float16 v = load16_f32(x + i);
            squares += v * v;
        }
        const float sum = reduce_sum(sum16(squares), scratch + place * LOCAL_SIZE, lid);
#if ROTATE
        barrier(CLK_GLOBAL_MEM_FENCE);  // the rotation writes pieces that other work-items have read
#endif
        if (!has_norm) continue;
        const float scale = 1.0f / sqrt(NO_OVERFLOW(sum) / HEAD_DIM + EPS);
#if VALUE_NORM
        if (head >= N_Q_HEADS + N_KV_HEADS) {
            for (int i = lid * 16; i < HEAD_DIM; i += LOCAL_SIZE * 16) store16_f32(load16_f32(x + i) * scale, x + i);
            continue;
        }
#endif
        __global const float* norm = norms + (head < N_Q_HEADS ? 0 : HEAD_DIM);
#if ROTATE  // a rotation keeps the squares' sum
        __global const float* turn = rope + (size_t)get_group_id(1) * HEAD_DIM;
        for (int i = lid * 8; i < HEAD_DIM / 2; i += LOCAL_SIZE * 8) {
            const float8 a = vload8(0, x + i), b = vload8(0, x + HEAD_DIM / 2 + i);
            const float8 cosine = vload8(0, turn + i), sine = vload8(0, turn + HEAD_DIM / 2 + i);
            vstore8((a * cosine - b * sine) * scale * vload8(0, norm + i), 0, x + i);
            vstore8((b * cosine + a * sine) * scale * vload8(0, norm + HEAD_DIM / 2 + i), 0, x + HEAD_DIM / 2 + i);
        }
#else
        for (int i = lid * 16; i < HEAD_DIM; i += LOCAL_SIZE * 16)
            store16_f32(load16_f32(x + i) * scale * load16_f32(norm + i), x + i);
#endif
#endif
    }
}

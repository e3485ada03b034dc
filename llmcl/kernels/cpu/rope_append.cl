// rope_append (portable/rope_append.cl: formula and arguments) for float caches on a CPU, with vectors of a head's dimensions.
//
// Index space: a work-group per token, local size 1. Build: as portable/rope_append.cl, except the head counts, which are arguments;
// KV f32, f16 or bf16.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(CAPACITY) || !defined(FIRST_ROW) || !defined(STATE_POSITION)
#error "cpu/rope_append.cl needs the build constants of rope_append.cl"
#endif
#include "common/kv_cache.cl"
#include "common/step_rows.cl"
#include "cpu/append_head.cl"

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void rope_append(__global float* qkv, __global const float* rope, __global const int* state,
                 __global kv_t* k_cache, __global kv_t* v_cache, const int n_q_heads, const int n_kv_heads) {
    const int t = FIRST_ROW + get_group_id(0), position = row_position(state, t);
    state = sequence_state(state, t);
    const int row = kv_row(state, position);
    qkv += (size_t)t * (n_q_heads + 2 * n_kv_heads) * HEAD_DIM;
    rope += (size_t)t * HEAD_DIM;
    float16 turned[HEAD_DIM / 16];

    for (int h = 0; h < n_q_heads; ++h, qkv += HEAD_DIM) {
        rotate_head(qkv, rope, (float*)turned);
        for (int c = 0; c < HEAD_DIM / 16; ++c) store16_f32(turned[c], qkv + 16 * c);
    }
    for (int h = 0; h < n_kv_heads; ++h, qkv += HEAD_DIM) {
        append_head(qkv, qkv + n_kv_heads * HEAD_DIM, rope, KV_TILES_AT(k_cache + h * KV_HEAD_SIZE, row),
                    KV_TILES_AT(v_cache + h * KV_HEAD_SIZE, row), row % 16);
    }
}

// Rotates a step's queries and keys, and appends keys and values to the cache (prefill).
//
//   (x_i, x_{i+D/2}) -> (x_i c_i - x_{i+D/2} s_i, x_{i+D/2} c_i + x_i s_i)       Su et al., "RoFormer"; half-split pairs
//
// qkv      float [n][(N_Q_HEADS + 2 N_KV_HEADS)][HEAD_DIM]; queries are rotated in place
// rope     float [n][HEAD_DIM]: cosines, then sines, from `embed`
// k_cache, v_cache  KV, N_KV_HEADS heads: see kv_cache.cl
//
// Index space: a work-group per token, local size LOCAL_SIZE; work-items share its heads. In a step with several sequences
// (step_rows.cl) rows
// from FIRST_ROW, an expression in `state`, on: attention_decode rotates and appends the decoding rows.
// Build: KV, N_Q_HEADS, N_KV_HEADS, HEAD_DIM (a multiple of 16), CAPACITY (a multiple of 16), LOCAL_SIZE, FIRST_ROW;
// for pages see kv_address.cl.
// The host must have checked position + n <= CAPACITY.
#if !defined(KV) || !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(HEAD_DIM) || !defined(CAPACITY) || \
    !defined(LOCAL_SIZE) || !defined(FIRST_ROW) || !defined(STATE_POSITION)
#error "rope_append.cl needs the build constants KV, N_Q_HEADS, N_KV_HEADS, HEAD_DIM, CAPACITY, LOCAL_SIZE, FIRST_ROW and those of the step state"
#endif
#include "common/append_token.cl"
#include "common/step_rows.cl"

#define PIECES (HEAD_DIM / 16)

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void rope_append(__global float* qkv, __global const float* rope, __global const int* state,
                 __global kv_t* k_cache, __global kv_t* v_cache) {
    const int t = FIRST_ROW + get_group_id(0), lid = get_local_id(0), position = row_position(state, t);
    state = sequence_state(state, t);
    const int row = kv_row(state, position);
    qkv += (size_t)t * (N_Q_HEADS + 2 * N_KV_HEADS) * HEAD_DIM;
    rope += (size_t)t * HEAD_DIM;

    append_token(state, qkv, rope, k_cache, v_cache, row, 0, N_KV_HEADS, lid, LOCAL_SIZE);
    for (int unit = lid; unit < N_Q_HEADS * PIECES; unit += LOCAL_SIZE) {
        const int i = unit % PIECES * 8;
        __global float* x = qkv + unit / PIECES * HEAD_DIM;
        const float8 a = vload8(0, x + i), b = vload8(0, x + HEAD_DIM / 2 + i);
        const float8 c = vload8(0, rope + i), s = vload8(0, rope + HEAD_DIM / 2 + i);
        vstore8(a * c - b * s, 0, x + i);
        vstore8(b * c + a * s, 0, x + HEAD_DIM / 2 + i);
    }
}

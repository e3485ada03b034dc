// Rotates the queries and keys of a step's tokens and appends keys and values to the cache (prefill).
//
//   (x_i, x_{i+D/2}) -> (x_i c_i - x_{i+D/2} s_i, x_{i+D/2} c_i + x_i s_i)       Su et al., "RoFormer"; half-split pairs
//
// qkv      float [n][(N_Q_HEADS + 2 N_KV_HEADS)][HEAD_DIM]; queries are rotated in place
// rope     float [n][HEAD_DIM]: cosines, then sines, from `embed`
// k_cache  KV [N_KV_HEADS][CAPACITY/16][HEAD_DIM][16]      v_cache  KV [N_KV_HEADS][CAPACITY][HEAD_DIM]
//
// Index space: one work-group of LOCAL_SIZE a token; work-items share its heads.
// Build: KV, N_Q_HEADS, N_KV_HEADS, HEAD_DIM (a multiple of 16), CAPACITY (a multiple of 16), LOCAL_SIZE;
// for pages see kv_address.cl.
// The host must have checked position + n <= CAPACITY.
#if !defined(KV) || !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(HEAD_DIM) || !defined(CAPACITY) || \
    !defined(LOCAL_SIZE) || !defined(STATE_POSITION)
#error "rope_append.cl needs the build constants KV, N_Q_HEADS, N_KV_HEADS, HEAD_DIM, CAPACITY, LOCAL_SIZE and those of the step state"
#endif
#include "common.cl"
#include "kv_address.cl"

#define PIECES (HEAD_DIM / 16)

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void rope_append(__global float* qkv, __global const float* rope, __global const int* state,
                 __global CAT(KV, _t)* k_cache, __global CAT(KV, _t)* v_cache) {
    const int t = get_group_id(0);
    const int row = kv_row(state, state[STATE_POSITION] + t);
    qkv += (size_t)t * (N_Q_HEADS + 2 * N_KV_HEADS) * HEAD_DIM;
    rope += (size_t)t * HEAD_DIM;

    for (int unit = get_local_id(0); unit < (N_Q_HEADS + 2 * N_KV_HEADS) * PIECES; unit += LOCAL_SIZE) {
        const int head = unit / PIECES, i = unit % PIECES * 8;
        __global float* x = qkv + head * HEAD_DIM;
        if (head >= N_Q_HEADS + N_KV_HEADS) {
            __global CAT(KV, _t)* v =
                v_cache + ((size_t)(head - N_Q_HEADS - N_KV_HEADS) * CAPACITY + row) * HEAD_DIM + 2 * i;
            for (int j = 0; j < 16; ++j) CAT(store1_, KV)(x[2 * i + j], v + j);
            continue;
        }
        const float8 a = vload8(0, x + i), b = vload8(0, x + HEAD_DIM / 2 + i);
        const float8 c = vload8(0, rope + i), s = vload8(0, rope + HEAD_DIM / 2 + i);
        float rotated[16];
        vstore8(a * c - b * s, 0, rotated);
        vstore8(b * c + a * s, 1, rotated);
        if (head < N_Q_HEADS) {
            vstore8(vload8(0, rotated), 0, x + i);
            vstore8(vload8(1, rotated), 0, x + HEAD_DIM / 2 + i);
            continue;
        }
        const size_t tile = (size_t)(head - N_Q_HEADS) * (CAPACITY / 16) + row / 16;
        __global CAT(KV, _t)* k = k_cache + (tile * HEAD_DIM + i) * 16 + row % 16;
        for (int j = 0; j < 8; ++j) {
            CAT(store1_, KV)(rotated[j], k + j * 16);
            CAT(store1_, KV)(rotated[8 + j], k + (HEAD_DIM / 2 + j) * 16);
        }
    }
}

// Causal flash attention for the tokens of a step on a CPU: BLOCK_M query rows of one head a work-item.
//
//   out[t][h] = softmax(scale q[t][h] K^T) V over keys 0 .. position + t
//
// qkv      float [n][N_Q_HEADS + 2 N_KV_HEADS][HEAD_DIM], queries rotated by `rope_append`, which also filled the cache
// k_cache  KV [N_KV_HEADS][CAPACITY/16][HEAD_DIM][16]      v_cache  KV [N_KV_HEADS][CAPACITY][HEAD_DIM]
// out      float [n][N_Q_HEADS][HEAD_DIM]
//
//                 keys 0 ...... position + t
//   queries   t0  [########\    ]             index space (N_Q_HEADS, ceil(n / BLOCK_M)), local size 1
//   BLOCK_M       [#########\   ]             # whole tiles; \ the tile that crosses the diagonal; the rest is
//   rows      ..  [##########\  ]             never visited
//
// Build: those of cpu/attention_tile.cl with ROWS = BLOCK_M, and N_Q_HEADS, N_KV_HEADS, CAPACITY (a multiple of BLOCK_N),
// SCALE.
#if !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(CAPACITY) || !defined(SCALE) || \
    !defined(STATE_POSITION) || !defined(STATE_N_TOKENS)
#error "cpu/attention_prefill.cl needs the build constants N_Q_HEADS, N_KV_HEADS, CAPACITY, SCALE and those of the step state"
#endif
#include "cpu/attention_tile.cl"

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void attention_prefill(__global const float* qkv, __global const int* state, __global const CAT(KV, _t)* k_cache,
                       __global const CAT(KV, _t)* v_cache, __global float* out) {
    const int head = get_group_id(0), t0 = get_group_id(1) * ROWS;
    const int position = state[STATE_POSITION], n = state[STATE_N_TOKENS];
    const int kv_head = head / (N_Q_HEADS / N_KV_HEADS);
    const int end = position + min(t0 + ROWS, n);  // keys that the last row sees
    k_cache += (size_t)kv_head * CAPACITY * HEAD_DIM;
    v_cache += (size_t)kv_head * CAPACITY * HEAD_DIM;

    attention_state attention;
    attention_start(&attention);
    for (int r = 0; r < ROWS; ++r) {
        // Rows past the last token repeat it: computed, never stored.
        __global const float* q =
            qkv + ((size_t)min(t0 + r, n - 1) * (N_Q_HEADS + 2 * N_KV_HEADS) + head) * HEAD_DIM;
        for (int i = 0; i < HEAD_DIM; ++i) attention.q[r * HEAD_DIM + i] = q[i] * SCALE;
    }
    for (int j = 0; j < end; j += BLOCK_N) {
        int visible[ROWS];
        for (int r = 0; r < ROWS; ++r) visible[r] = clamp(position + min(t0 + r, n - 1) + 1 - j, 0, BLOCK_N);
        attention_tile(&attention, k_cache + (size_t)j * HEAD_DIM, v_cache + (size_t)j * HEAD_DIM,
                       min(BLOCK_N, end - j), visible);
    }
    for (int r = 0; r < ROWS && t0 + r < n; ++r) {
        const float norm = softmax_norm(attention.l[r]);
        for (int c = 0; c < COLUMNS; ++c)
            store16_f32(attention.acc[r][c] * norm,
                        out + ((size_t)(t0 + r) * N_Q_HEADS + head) * HEAD_DIM + c * 16);
    }
}

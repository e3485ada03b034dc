// Flash attention for a step's tokens on a CPU: BLOCK_M query rows in one head per work-item.
//
//   out[b][t][h] = softmax(score_mod(scale q[b][t][h] K^T)) V over the keys visible to t
//
// Without KV_BLOCK_RANGES a query at position p sees keys 0 .. p (subject to mask_mod), counted from the step's position. With
// KV_BLOCK_RANGES a query sees the keys in its group's ranges; in partial ranges mask_mod decides. With BIDIRECTIONAL instead,
// a query sees all keys of the step (subject to mask_mod).
//
// q        float, see query_address.cl; rotated if the model rotates
// k_cache, v_cache  KV, [batch][n_kv_heads] heads: see kv_cache.cl
// out      float, see query_address.cl
// lse      float [batch][n_q_heads][n], with LSE: log of the sum of exponentials, -inf for a query without visible keys
// ranges   int, with KV_BLOCK_RANGES: see kv_block_ranges.cl
// max_scores float [batch][n_q_heads][n], with MAX_SCORES: see online_softmax.cl
// sinks    float [n_q_heads], with HAS_SINKS: see online_softmax.cl; lse contains them
//
//                 keys 0 ...... position + t
//   queries   t0  [########\    ]             index space (n_q_heads, ceil(n / BLOCK_M), batch), local size 1
//   BLOCK_M       [#########\   ]             # whole tiles; \ the tile that crosses the diagonal; the rest is
//   rows      ..  [##########\  ]             never visited
//
// Build: constants for cpu/attention_tile.cl with ROWS = BLOCK_M, and CAPACITY (a multiple of BLOCK_N; with KV_BLOCK_RANGES of
// 16), KV_BLOCK_RANGES, LSE, constants for query_address.cl. Head counts, the query stride and `scale` are arguments: calls with
// different values share a program.
// For pages of keys and values see kv_address.cl, for runs from several sequences query_block.cl.
#if !defined(CAPACITY) || !defined(KV_BLOCK_RANGES) || !defined(LSE) || !defined(STATE_POSITION) || !defined(STATE_N_TOKENS)
#error "cpu/attention_prefill.cl needs CAPACITY, KV_BLOCK_RANGES, LSE, the step state"
#endif
#define SCALE scale
#include "cpu/attention_tile.cl"
#include "common/kv_block_ranges.cl"
#include "common/query_address.cl"
#include "common/query_block.cl"

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void attention_prefill(__global const float* q, __global const int* state, __global const kv_t* k_cache,
                       __global const kv_t* v_cache, __global float* out, __global float* lse,
                       __global const int* ranges MAX_SCORES_PARAM SINKS_PARAM MOD_PARAMS,
                       const int n_q_heads, const int n_kv_heads, const int q_stride, const float scale) {
    const int head = get_group_id(0), batch = get_group_id(2);
    // The longest rows first: short rows fill the end.
    const query_block block = query_block_at(state, LONGEST_FIRST((int)get_group_id(1), (int)get_num_groups(1)));
    const int t0 = block.t0, position = block.position, n = block.n;
    const int kv_head = head / (n_q_heads / n_kv_heads), sequence = batch + MOD_SEQUENCE(block.state);
    k_cache += (batch * n_kv_heads + kv_head) * KV_HEAD_SIZE;
    v_cache += (batch * n_kv_heads + kv_head) * KV_HEAD_SIZE;
    q += first_query(batch, head, n, n_q_heads, q_stride);

    attention_state attention;
    attention_start(&attention);
    for (int r = 0; r < ROWS; ++r) {
        // Rows past the last token repeat the last token: computed, never stored.
        const int t = min(t0 + r, n - 1);
        for (int c = 0; c < COLUMNS; ++c)
            attention.q[r][c] = load16_f32(q + (size_t)t * q_stride + c * 16) * QUERY_SCALE;
        attention.head[r] = head;
        attention.q_idx[r] = position + t;
    }
    round_queries(&attention);
    int visible[ROWS];
    const int2 rows = (int2)(attention.q_idx[0], attention.q_idx[ROWS - 1]);
    kv_block_ranges left = RANGES_OF(sequence, head, t0 / ROWS, rows, position + LAST_OF(min(t0 + ROWS, n), n));
    for (int2 range = take_range(&left); range.y > 0; range = take_range(&left)) {
        for (int j = RANGE_FIRST(range); j < range.y; j += BLOCK_N) {
            const int n_keys = min(BLOCK_N, range.y - j);
            const int seen = class_in_range(range, sequence, head, rows, j, j + n_keys MOD_ARGS);
            if (seen == TILE_EMPTY) continue;
            for (int r = 0; r < ROWS; ++r) visible[r] = ALL_OF_RANGE ? n_keys : clamp(attention.q_idx[r] + 1 - j, 0, BLOCK_N);
            const int row = kv_row(block.state, j);
            attention_tile(&attention, KV_TILES_AT(k_cache, row), KV_TILES_AT(v_cache, row), n_keys, visible, sequence, j,
                           seen == TILE_PARTIAL MOD_ARGS);
        }
    }
    for (int r = 0; r < ROWS && t0 + r < n; ++r) {
        const size_t row = output_of(batch, head, t0 + r, n, n_q_heads);
        const float m = attention.m[r] * LN_2, l = sum16(attention.l[r]), norm = OUTPUT_NORM(m, l, head);
        for (int c = 0; c < COLUMNS; ++c)
            store16_f32(attention.acc[r][c] * norm, out + row + c * 16);
#if LSE
        lse[((size_t)batch * n_q_heads + head) * n + t0 + r] = LOG_SUM(m, l, head);
#endif
        KEEP_MAX_SCORE(((size_t)batch * n_q_heads + head) * n + t0 + r, m);
    }
}

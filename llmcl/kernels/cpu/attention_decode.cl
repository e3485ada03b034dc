// Decode attention on a CPU: rotates the new token's queries and key, appends key and value, attends to the cache.
//
//   out[h] = softmax(scale q[h] K^T) V over keys 0 .. position, for a KV head's GROUP_SIZE query heads h
//
// qkv      float [n_q_heads + 2 n_kv_heads][HEAD_DIM], not rotated      rope  float [HEAD_DIM], from `embed`
// k_cache, v_cache  KV, n_kv_heads heads: see kv_cache.cl
// part_ml, part_acc  partial states [n_q_heads][n_splits] for `attention_merge`; with n_splits = 1 part_acc is the output
// sinks    float [n_q_heads], with HAS_SINKS: see online_softmax.cl; used with one split, else by `attention_merge`
//
//            keys 0 ......................... position          index space (n_kv_heads, n_splits, rows), local size 1
//   head 0   [ split 0 | split 1 | ... | last split ]           each work-item reads its keys once for all
//   head 1   [ split 0 | split 1 | ... | last split ]           GROUP_SIZE query heads; the work-item whose split holds
//                                                               `position` appends
// Build: constants for cpu/attention_tile.cl with ROWS = GROUP_SIZE, and CAPACITY (a multiple of BLOCK_N). The host must have checked
// position < CAPACITY. Head and split counts and `scale` are arguments: models with different counts share a program.
// For pages of keys and values see kv_address.cl.
#if !defined(CAPACITY) || !defined(STATE_POSITION)
#error "cpu/attention_decode.cl needs the build constants CAPACITY and those of the step state"
#endif
#define N_Q_HEADS n_q_heads
#define N_KV_HEADS n_kv_heads
#define SCALE scale
#include "cpu/prefetch.cl"
#define AHEAD 2  // steps
#include "cpu/attention_tile.cl"
#include "common/qkv_row.cl"
#include "common/step_rows.cl"
#include "cpu/append_head.cl"
#include "cpu/unit.cl"

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void attention_decode(__global const float* qkv, __global const float* rope, __global const int* state,
                      __global kv_t* k_cache, __global kv_t* v_cache,
                      __global float* part_ml, __global float* part_acc SINKS_PARAM MOD_PARAMS,
                      const int n_q_heads, const int n_kv_heads, const int n_splits, const float scale) {
    BEGIN_UNIT;
    const int head = get_group_id(0), split = get_group_id(1);
    const int t = step_row(2);
    state = sequence_state(state, t);
    qkv += t * QKV_HEADS * HEAD_DIM;
    rope += t * HEAD_DIM;
    part_ml += t * n_q_heads * n_splits * 2;
    part_acc += (size_t)t * n_q_heads * n_splits * HEAD_DIM;
    const int position = state[STATE_POSITION], kv_len = position + 1;
    // The splits share the keys after the prefix hidden by mask_mod.
    const int2 query = (int2)(position);
    const int sequence = MOD_SEQUENCE(state);
    const int visible_from = first_visible(sequence, head * ROWS, ROWS, query, kv_len, BLOCK_N MOD_ARGS);
    const int per_split = (kv_len - visible_from + n_splits * BLOCK_N - 1) / (n_splits * BLOCK_N) * BLOCK_N;
    const int first = visible_from + split * per_split, end = min(kv_len, first + per_split);

    k_cache += head * KV_HEAD_SIZE;
    v_cache += head * KV_HEAD_SIZE;

#if !SHARED_KV
    const bool appends = first <= position && position < end;
    const int own_row = kv_row(state, position);
    // A key occupies a cache line per two dimensions: they are requested before the queries are rotated.
    if (appends) PREFETCH_ALL(KV_TILES_AT(k_cache, own_row), KV_TILE * sizeof(kv_t));
#endif
    if (first < end) {
        const int row = kv_row(state, first);
        PREFETCH_ALL(KV_TILES_AT(k_cache, row), BLOCK_N / 16 * KV_TILE * sizeof(kv_t));
        PREFETCH_ALL(KV_TILES_AT(v_cache, row), BLOCK_N / 16 * KV_TILE * sizeof(kv_t));
    }
    attention_state attention;
    attention_start(&attention);
    for (int r = 0; r < ROWS; ++r) {
        __global const float* q = qkv + (head * ROWS + r) * HEAD_DIM;
        rotate_head(q, rope, (float*)attention.q[r]);
        for (int c = 0; c < COLUMNS; ++c) attention.q[r][c] *= QUERY_SCALE;
        attention.head[r] = head * ROWS + r;
        attention.q_idx[r] = position;
    }
    round_queries(&attention);
#if !SHARED_KV
    if (PIECES_STORED == 0) {
        if (!MAY_STORE) return;
        if (appends) {
            __global const float* k = qkv + (n_q_heads + head) * HEAD_DIM;
            append_head(k, k + n_kv_heads * HEAD_DIM, rope, KV_TILES_AT(k_cache, own_row), KV_TILES_AT(v_cache, own_row),
                        own_row % 16);
        }
        PIECE_STORED;
    }
#endif
    for (int j = first; j < end; j += BLOCK_N) {
        const int n_keys = min(BLOCK_N, end - j);
        const int seen = tile_class(sequence, head * ROWS, ROWS, query, j, j + n_keys MOD_ARGS);
        if (seen == TILE_EMPTY) continue;
        int visible[ROWS];
        for (int r = 0; r < ROWS; ++r) visible[r] = n_keys;
        const int row = kv_row(state, j), later = kv_row(state, min(j + AHEAD * BLOCK_N, end - 1) / BLOCK_N * BLOCK_N);
        attention.later_k = KV_TILES_AT(k_cache, later);
        attention.later_v = KV_TILES_AT(v_cache, later);
        attention_tile(&attention, KV_TILES_AT(k_cache, row), KV_TILES_AT(v_cache, row), n_keys, visible, sequence, j,
                       seen == TILE_PARTIAL MOD_ARGS);
    }
    if (!MAY_STORE) return;
    for (int r = 0; r < ROWS; ++r) {
        const int part = (head * ROWS + r) * n_splits + split;
        const float l = sum16(attention.l[r]);
        float norm = 1.0f;
        if (n_splits > 1) {
            part_ml[2 * part] = attention.m[r] * LN_2;
            part_ml[2 * part + 1] = l;
            if (l == 0.0f) continue;
        } else {
            norm = OUTPUT_NORM(attention.m[r] * LN_2, l, head * ROWS + r);
        }
        for (int c = 0; c < COLUMNS; ++c)
            store16_f32(attention.acc[r][c] * norm, part_acc + (size_t)part * HEAD_DIM + c * 16);
    }
    PIECE_STORED;
}

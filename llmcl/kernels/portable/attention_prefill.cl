// Flash attention for the tokens of a step on any device, with the output in slices of DV_TILE columns.
// Formula and arguments as in cpu/attention_prefill.cl.
//
// A work-group of 16 x 8 work-items (tx, ty) takes BLOCK_M query rows of one head. For each slice of DV_TILE output
// columns it walks the keys again: the scores are recomputed HEAD_DIM / DV_TILE times, and the accumulator of a
// work-item shrinks to BLOCK_M / 8 * DV_TILE / 16 registers.
//
//                 BLOCK_N keys                      DV_TILE columns
//            +-----------------+                 +-----------------+
//   BLOCK_M  | S: rows ty + 8a |  -> local P ->  | O: rows ty + 8a |
//   rows     |    keys tx + 16b|                 |  cols tx + 16c  |
//            +-----------------+                 +-----------------+
// Staged in local memory: the queries (float), a tile of keys or of a slice of values (as stored; q8_0 as
// float), P (float).
//
// Index space: groups (N_Q_HEADS, ceil(n / BLOCK_M), batch) of (16, 8).
// Build: KV, HEAD_DIM, N_KV_HEADS, CAPACITY (a multiple of BLOCK_N), SCALE, KV_BLOCK_RANGES, LSE, those of query_address.cl,
// BLOCK_M (a multiple of 8), BLOCK_N and DV_TILE (multiples of 16; DV_TILE divides HEAD_DIM).
// Local memory: 4 BLOCK_M (HEAD_DIM + 1) + BLOCK_N HEAD_DIM sizeof(KV; float with q8_0) + 4 BLOCK_M (BLOCK_N + 1) bytes.
// For pages of keys and values see kv_address.cl.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(CAPACITY) || \
    !defined(SCALE) || !defined(BLOCK_M) || !defined(BLOCK_N) || !defined(DV_TILE) || \
    !defined(KV_BLOCK_RANGES) || !defined(LSE) || !defined(STATE_POSITION) || !defined(STATE_N_TOKENS)
#error "portable/attention_prefill.cl needs the build constants named in its head"
#endif
#include "common/kv_cache.cl"
#include "common/online_softmax.cl"
#include "common/attention_mods.cl"
#include "common/kv_block_ranges.cl"
#include "common/query_address.cl"

#define TX 16
#define TY 8
#define ROWS (BLOCK_M / TY)
#define KEYS (BLOCK_N / TX)
#define COLUMNS (DV_TILE / TX)

// Element i of a range of keys as local memory has them, [keys/16][HEAD_DIM][16]; of DV_TILE columns of values, [values][DV_TILE].
#if KV_QUANTIZED
inline float staged_key(__global const kv_t* k, const int i) {
    const int d = i / 16 % HEAD_DIM;
    const float4 four = key4_at(k, i / (16 * HEAD_DIM) * 16 + i % 16, d & ~3);
    return d & 2 ? (d & 1 ? four.w : four.z) : (d & 1 ? four.y : four.x);
}
#define staged_value(v, i, slice) value_at(v, (i) / DV_TILE, (slice) + (i) % DV_TILE)
#else
#define staged_key(k, i) ((k)[i])
#define staged_value(v, i, slice) ((v)[(size_t)((i) / DV_TILE) * HEAD_DIM + (slice) + (i) % DV_TILE])
#endif

__kernel __attribute__((reqd_work_group_size(TX, TY, 1)))
void attention_prefill(__global const float* queries, __global const int* state, __global const kv_t* k_cache,
                       __global const kv_t* v_cache, __global float* out, __global float* lse,
                       __global const int* ranges MOD_PARAMS) {
    __local float q[BLOCK_M][HEAD_DIM + 1];
    __local CAT(KV_STAGED, _t) kv[BLOCK_N * HEAD_DIM];
    __local float p[BLOCK_M][BLOCK_N + 1];
    const int tx = get_local_id(0), ty = get_local_id(1), lid = ty * TX + tx;
    const int head = get_group_id(0), t0 = get_group_id(1) * BLOCK_M, batch = get_group_id(2);
    const int position = state[STATE_POSITION], n = state[STATE_N_TOKENS];
    const int kv_head = head / (N_Q_HEADS / N_KV_HEADS);
    k_cache += (batch * N_KV_HEADS + kv_head) * KV_HEAD_SIZE;
    v_cache += (batch * N_KV_HEADS + kv_head) * KV_HEAD_SIZE;
    queries += first_query(batch, head, n);

    for (int i = lid; i < BLOCK_M * HEAD_DIM; i += TX * TY) {
        const int token = min(t0 + i / HEAD_DIM, n - 1);
        q[i / HEAD_DIM][i % HEAD_DIM] =
            queries[(size_t)token * Q_STRIDE + i % HEAD_DIM] * SCALE;
    }
    const int2 rows = (int2)(position + t0, position + min(t0 + BLOCK_M, n) - 1);
    for (int slice = 0; slice < HEAD_DIM; slice += DV_TILE) {
        float m[ROWS], l[ROWS], acc[ROWS][COLUMNS];
        for (int a = 0; a < ROWS; ++a) {
            m[a] = -INFINITY;
            l[a] = 0.0f;
            for (int c = 0; c < COLUMNS; ++c) acc[a][c] = 0.0f;
        }
        kv_block_ranges left = RANGES_OF(batch, head, t0 / BLOCK_M, rows, position + min(t0 + BLOCK_M, n));
        for (int2 range = take_range(&left); range.y > 0; range = take_range(&left)) {
            for (int j = RANGE_FIRST(range); j < range.y; j += BLOCK_N) {
                const int n_keys = min(BLOCK_N, range.y - j), row = kv_row(state, j);
                __global const kv_t* k = KV_TILES_AT(k_cache, row);
                __global const kv_t* v = KV_TILES_AT(v_cache, row);
                const int seen_as = class_in_range(range, batch, head, rows, j, j + n_keys MOD_ARGS);
                if (seen_as == TILE_EMPTY) continue;
                barrier(CLK_LOCAL_MEM_FENCE);
                for (int i = lid; i < BLOCK_N * HEAD_DIM; i += TX * TY) kv[i] = staged_key(k, i);
                barrier(CLK_LOCAL_MEM_FENCE);
                float s[ROWS][KEYS];
                for (int a = 0; a < ROWS; ++a)
                    for (int b = 0; b < KEYS; ++b) s[a][b] = 0.0f;
                for (int d = 0; d < HEAD_DIM; ++d) {
                    float key[KEYS];
                    for (int b = 0; b < KEYS; ++b) key[b] = CAT(local1_, KV_STAGED)(kv + (b * HEAD_DIM + d) * 16 + tx);
                    for (int a = 0; a < ROWS; ++a)
                        for (int b = 0; b < KEYS; ++b) s[a][b] += q[ty + TY * a][d] * key[b];
                }
                for (int a = 0; a < ROWS; ++a) {
                    const int q_idx = position + min(t0 + ty + TY * a, n - 1);
#if KV_BLOCK_RANGES
                    const int visible = n_keys;
#else
                    const int visible = min(n_keys, q_idx + 1 - j);
#endif
                    for (int b = 0; b < KEYS; ++b) {
                        bool seen = tx + 16 * b < visible;
#if HAS_MASK_MOD
                        if (seen && seen_as == TILE_PARTIAL) seen = mask_mod(batch, head, q_idx, j + tx + 16 * b MOD_ARGS);
#endif
#if HAS_SCORE_MOD
                        if (seen) s[a][b] = score_mod(s[a][b], batch, head, q_idx, j + tx + 16 * b MOD_ARGS);
#endif
                        p[ty + TY * a][tx + 16 * b] = seen ? s[a][b] : -INFINITY;
                    }
                }
                barrier(CLK_LOCAL_MEM_FENCE);
                for (int i = lid; i < n_keys * DV_TILE; i += TX * TY) kv[i] = staged_value(v, i, slice);
                for (int a = 0; a < ROWS; ++a) {
                    // The 16 work-items of a row compute its state alike: cheaper than a reduction across them.
                    float top = m[a];
                    for (int i = 0; i < n_keys; ++i) top = fmax(top, p[ty + TY * a][i]);
                    const float shrink = softmax_weight(m[a], top);
                    m[a] = top;
                    l[a] *= shrink;
                    for (int c = 0; c < COLUMNS; ++c) acc[a][c] *= shrink;
                }
                barrier(CLK_LOCAL_MEM_FENCE);
                for (int a = 0; a < ROWS; ++a)
                    for (int b = 0; b < KEYS; ++b)
                        p[ty + TY * a][tx + 16 * b] = softmax_weight(p[ty + TY * a][tx + 16 * b], m[a]);
                barrier(CLK_LOCAL_MEM_FENCE);
                for (int i = 0; i < n_keys; ++i) {
                    float value[COLUMNS];
                    for (int c = 0; c < COLUMNS; ++c) value[c] = CAT(local1_, KV_STAGED)(kv + i * DV_TILE + tx + TX * c);
                    for (int a = 0; a < ROWS; ++a) {
                        const float e = p[ty + TY * a][i];
                        l[a] += e;
                        for (int c = 0; c < COLUMNS; ++c) acc[a][c] += e * value[c];
                    }
                }
            }
        }
        for (int a = 0; a < ROWS; ++a) {
            const int t = t0 + ty + TY * a;
            if (t >= n) continue;
#if LSE
            if (slice == 0 && tx == 0)
                lse[((size_t)batch * N_Q_HEADS + head) * n + t] = l[a] > 0.0f ? m[a] + log(l[a]) : -INFINITY;
#endif
            for (int c = 0; c < COLUMNS; ++c)
                out[output_of(batch, head, t, n) + slice + tx + TX * c] = acc[a][c] * softmax_norm(l[a]);
        }
    }
}

// Flash attention for a step's tokens on any device, with the output in slices of DV_TILE columns.
// Formula and arguments as in cpu/attention_prefill.cl.
//
// A work-group with 16 x BLOCK_M / ROWS work-items (tx, ty) processes BLOCK_M query rows in one head, ROWS per work-item.
// For each slice of DV_TILE output columns it walks the keys again: scores are recomputed HEAD_DIM / DV_TILE times, and a work-item's
// accumulator takes ROWS * DV_TILE / 16 registers.
//
//                 BLOCK_N keys                          DV_TILE columns
//            +---------------------+                 +---------------------+
//   BLOCK_M  | S: rows ROWS ty + a |  -> local P ->  | O: rows ROWS ty + a |
//   rows     |    keys KEYS tx + b |                 |  cols COLUMN_OF(c)  |
//            +---------------------+                 +---------------------+
// Local memory: the queries, transposed (float); a key tile [dimension][key] or a value slice's tile [key][column] (as stored;
// q8_0 as float); P, transposed (float); partial results shared by a row's work-items. A row's maximum is reduced over its 16 work-items
// for each tile, its sum once at the end. Four barriers per tile.
//
// With eight rows per work-item values are read from the cache, and keys, maxima and P share the same memory in turn. A tile then needs
// six barriers, but twice the queries fit: each key and value read is used in more products.
//
// Index space: groups (N_Q_HEADS, ceil(n / BLOCK_M), batch) of (16, BLOCK_M / ROWS).
// Build: ITEM_ROWS (ROWS, 4; or 8, where BLOCK_M / ROWS is a power of two, without q8_0 and KEY_DIMS),
// KV, HEAD_DIM, N_KV_HEADS, CAPACITY (a multiple of BLOCK_N), SCALE, KV_BLOCK_RANGES, LSE, those of query_address.cl; BIDIRECTIONAL (kv_block_ranges.cl);
// BLOCK_M (a multiple of 8), BLOCK_N (16, 32 or 64) and DV_TILE (a multiple of 16 that divides HEAD_DIM).
// KEY_DIMS, if defined: key dimensions in local memory at a time (a multiple of 16 that divides HEAD_DIM).
// Local memory: 4 (HEAD_DIM + BLOCK_N) (BLOCK_M + 4) + BLOCK_N HEAD_DIM sizeof(KV; float with q8_0) + 64 BLOCK_M bytes,
// with KEY_DIMS max(KEY_DIMS, DV_TILE) in place of the second HEAD_DIM; with eight rows 4 HEAD_DIM BLOCK_M + BLOCK_N
// max(HEAD_DIM sizeof(KV), 4 BLOCK_M) bytes.
// For pages of keys and values see kv_address.cl, for runs of several sequences query_block.cl.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(CAPACITY) || \
    !defined(SCALE) || !defined(BLOCK_M) || !defined(BLOCK_N) || !defined(DV_TILE) || !defined(ITEM_ROWS) || \
    !defined(KV_BLOCK_RANGES) || !defined(LSE) || !defined(STATE_POSITION) || !defined(STATE_N_TOKENS)
#error "portable/attention_prefill.cl needs the build constants named in its head"
#endif
#include "common/kv_cache.cl"
#include "common/online_softmax.cl"
#include "common/attention_mods.cl"
#include "common/kv_block_ranges.cl"
#include "common/query_address.cl"
#include "common/query_block.cl"
#include "portable/widen.cl"

#ifdef KEY_DIMS
#define EACH_KEY_SLICE for (int key_slice = 0; key_slice < HEAD_DIM; key_slice += KEY_DIMS)
#define KEY_SLICE key_slice
#define STAGED_DIMS (KEY_DIMS > DV_TILE ? KEY_DIMS : DV_TILE)
#else
#define EACH_KEY_SLICE
#define KEY_SLICE 0
#define KEY_DIMS HEAD_DIM
#define STAGED_DIMS HEAD_DIM
#endif

#define TX 16
#define ROWS ITEM_ROWS
#define TY (BLOCK_M / ROWS)
#define ITEMS (TX * TY)
#define VALUES_IN_PLACE (ROWS == 8)
#if VALUES_IN_PLACE
#define ROW_STRIDE BLOCK_M
#define P_ROWS(key) (own ^ (key) / 4 % TY * ROWS)  // neighbours store to different banks
#define DIMS_AT_ONCE 8
#define KEYS_AT_ONCE 16  // enough values in flight
#else
#define ROW_STRIDE (BLOCK_M + 4)
#define P_ROWS(key) own
#define DIMS_AT_ONCE 4
#define KEYS_AT_ONCE 2
#endif
#define staged_t CAT(KV_STAGED, _t)
#define PIECE (16 / (int)sizeof(staged_t))  // elements in 16 bytes

// A work-item's keys, and its columns in vectors of COLUMN_RUN.
#if BLOCK_N == 64
typedef float4 keys_t;
#define KEYS 4
#define KEYS_AT CAT(local4_, KV_STAGED)
#define STORE_KEYS(v, to) vstore4(v, 0, to)
#elif BLOCK_N == 32
typedef float2 keys_t;
#define KEYS 2
#define KEYS_AT(p) ((float2)(CAT(local1_, KV_STAGED)(p), CAT(local1_, KV_STAGED)((p) + 1)))
#define STORE_KEYS(v, to) vstore2(v, 0, to)
#else
typedef float keys_t;
#define KEYS 1
#define KEYS_AT CAT(local1_, KV_STAGED)
#define STORE_KEYS(v, to) ((to)[0] = (v))
#endif
#if DV_TILE % 64 == 0
typedef float4 columns_t;
#define COLUMN_RUN 4
#define COLUMNS_AT CAT(local4_, KV_STAGED)
#define VALUES_AT CAT(four_, KV)
#define STORE_COLUMNS(v, to) vstore4(v, 0, to)
#else
typedef float columns_t;
#define COLUMN_RUN 1
#define COLUMNS_AT CAT(local1_, KV_STAGED)
#define VALUES_AT CAT(load1_, KV)
#define STORE_COLUMNS(v, to) ((to)[0] = (v))
#endif
#define RUNS (DV_TILE / TX / COLUMN_RUN)
#define COLUMN_OF(c) (((c) * TX + tx) * COLUMN_RUN)

inline float4 local4_f32(__local const f32_t* p) { return *(__local const float4*)p; }
inline float4 local4_f16(__local const f16_t* p) { return widen4_f16(*(__local const uint2*)p); }
inline float4 local4_bf16(__local const bf16_t* p) { return widen4_bf16(*(__local const uint2*)p); }

// Loads KEY_DIMS dimensions, from `slice` on, of BLOCK_N keys from tile `k` on into local memory.
inline void stage_keys(__global const kv_t* k, __local staged_t* to, const int slice, const int lid) {
#if KV_QUANTIZED
    for (int i = lid; i < BLOCK_N * (KEY_DIMS / 4); i += ITEMS) {
        const int key = i % BLOCK_N, d = i / BLOCK_N * 4;
        const float4 v = key4_at(k, key, slice + d);
        to[d * BLOCK_N + key] = v.x;
        to[(d + 1) * BLOCK_N + key] = v.y;
        to[(d + 2) * BLOCK_N + key] = v.z;
        to[(d + 3) * BLOCK_N + key] = v.w;
    }
#else
    for (int i = lid; i < BLOCK_N * KEY_DIMS / PIECE; i += ITEMS) {
        const int key = i % (BLOCK_N / PIECE) * PIECE, d = i / (BLOCK_N / PIECE);
        *(__local uint4*)(to + d * BLOCK_N + key) =
            *(__global const uint4*)(k + (key / 16 * HEAD_DIM + slice + d) * 16 + key % 16);
    }
#endif
}

// Loads columns slice .. slice + DV_TILE - 1 of n_keys values from tile `v` on.
inline void stage_values(__global const kv_t* v, __local staged_t* to, const int slice, const int n_keys, const int lid) {
#if KV_QUANTIZED
    for (int i = lid; i < n_keys * DV_TILE; i += ITEMS) to[i] = value_at(v, i / DV_TILE, slice + i % DV_TILE);
#else
    for (int i = lid; i < n_keys * (DV_TILE / PIECE); i += ITEMS) {
        const int key = i / (DV_TILE / PIECE), c = i % (DV_TILE / PIECE) * PIECE;
        *(__local uint4*)(to + key * DV_TILE + c) = *(__global const uint4*)(v + (size_t)key * HEAD_DIM + slice + c);
    }
#endif
}

// Loads a work-item's ROWS values from a column in local memory.
inline void load_rows(float rows[ROWS], __local const float* p) {
#pragma unroll
    for (int a = 0; a < ROWS; a += 4) {
        const float4 v = *(__local const float4*)(p + a);
        rows[a] = v.x;
        rows[a + 1] = v.y;
        rows[a + 2] = v.z;
        rows[a + 3] = v.w;
    }
}
inline void store_rows(const float rows[ROWS], __local float* p) {
#pragma unroll
    for (int a = 0; a < ROWS; a += 4) *(__local float4*)(p + a) = (float4)(rows[a], rows[a + 1], rows[a + 2], rows[a + 3]);
}

__kernel __attribute__((reqd_work_group_size(TX, TY, 1)))
void attention_prefill(__global const float* queries, __global const int* state, __global const kv_t* k_cache,
                       __global const kv_t* v_cache, __global float* out, __global float* lse,
                       __global const int* ranges MAX_SCORES_PARAM SINKS_PARAM MOD_PARAMS) {
    __local float q[HEAD_DIM * ROW_STRIDE] __attribute__((aligned(16)));  // [dimension][row]
#if VALUES_IN_PLACE
    __local uint4 shared[MAX(BLOCK_N * HEAD_DIM / PIECE, BLOCK_N * BLOCK_M / 4)];  // used in turn by all three
    __local staged_t* const kv = (__local staged_t*)shared;
    __local float *const p = (__local float*)shared, *const parts = (__local float*)shared;
#else
    __local staged_t kv[BLOCK_N * STAGED_DIMS] __attribute__((aligned(16)));
    __local float p[BLOCK_N * ROW_STRIDE] __attribute__((aligned(16)));  // [key][row]
    __local float parts[TX * BLOCK_M] __attribute__((aligned(16)));      // [tx][row]: maxima, at the end sums
#endif
    const int tx = get_local_id(0), ty = get_local_id(1), lid = ty * TX + tx, own = ROWS * ty;
    const int head = get_group_id(0), batch = get_group_id(2);
    const query_block block = query_block_at(state, LONGEST_FIRST((int)get_group_id(1), (int)get_num_groups(1)));
    const int t0 = block.t0, position = block.position, n = block.n;
    const int kv_head = head / (N_Q_HEADS / N_KV_HEADS), sequence = batch + MOD_SEQUENCE(block.state);
    k_cache += (batch * N_KV_HEADS + kv_head) * KV_HEAD_SIZE;
    v_cache += (batch * N_KV_HEADS + kv_head) * KV_HEAD_SIZE;
    queries += first_query(batch, head, n, N_Q_HEADS, Q_STRIDE);

    for (int i = lid; i < BLOCK_M * HEAD_DIM / 4; i += ITEMS) {
        const int token = i % BLOCK_M, d = i / BLOCK_M * 4;
        const float4 v = vload4(0, queries + (size_t)min(t0 + token, n - 1) * Q_STRIDE + d) * SCALE;
        q[d * ROW_STRIDE + token] = v.x;
        q[(d + 1) * ROW_STRIDE + token] = v.y;
        q[(d + 2) * ROW_STRIDE + token] = v.z;
        q[(d + 3) * ROW_STRIDE + token] = v.w;
    }
    const int2 rows = (int2)(position + t0, position + min(t0 + BLOCK_M, n) - 1);
    for (int slice = 0; slice < HEAD_DIM; slice += DV_TILE) {
        float m[ROWS], l[ROWS];
        columns_t acc[ROWS][RUNS];
#pragma unroll
        for (int a = 0; a < ROWS; ++a) {
            m[a] = -INFINITY;
            l[a] = 0.0f;
#pragma unroll
            for (int c = 0; c < RUNS; ++c) acc[a][c] = 0.0f;
        }
        kv_block_ranges left = RANGES_OF(sequence, head, t0 / BLOCK_M, rows, position + LAST_OF(min(t0 + BLOCK_M, n), n));
        for (int2 range = take_range(&left); range.y > 0; range = take_range(&left)) {
            for (int j = RANGE_FIRST(range); j < range.y; j += BLOCK_N) {
                const int n_keys = min(BLOCK_N, range.y - j), row = kv_row(block.state, j);
                const int seen_as = class_in_range(range, sequence, head, rows, j, j + n_keys MOD_ARGS);
                if (seen_as == TILE_EMPTY) continue;
                keys_t s[ROWS];
#pragma unroll
                for (int a = 0; a < ROWS; ++a) s[a] = 0.0f;
                EACH_KEY_SLICE {
                    barrier(CLK_LOCAL_MEM_FENCE);
                    stage_keys(KV_TILES_AT(k_cache, row), kv, KEY_SLICE, lid);
                    barrier(CLK_LOCAL_MEM_FENCE);
#pragma unroll DIMS_AT_ONCE
                    for (int d = 0; d < KEY_DIMS; ++d) {
                        const keys_t key = KEYS_AT(kv + d * BLOCK_N + KEYS * tx);
                        float query[ROWS];
                        load_rows(query, q + (KEY_SLICE + d) * ROW_STRIDE + own);
#pragma unroll
                        for (int a = 0; a < ROWS; ++a) s[a] += query[a] * key;
                    }
                }
                float scores[KEYS][ROWS], top[ROWS];
#pragma unroll
                for (int a = 0; a < ROWS; ++a) {
                    const int q_idx = position + min(t0 + own + a, n - 1);
#if ALL_OF_RANGE
                    const int visible = n_keys;
#else
                    const int visible = min(n_keys, q_idx + 1 - j);
#endif
                    float of_row[KEYS];
                    STORE_KEYS(s[a], of_row);
                    top[a] = -INFINITY;
#pragma unroll
                    for (int b = 0; b < KEYS; ++b) {
                        const int key = KEYS * tx + b;
                        bool seen = key < visible;
#if HAS_MASK_MOD
                        if (seen && seen_as == TILE_PARTIAL) seen = mask_mod(sequence, head, q_idx, j + key MOD_ARGS);
#endif
#if HAS_SCORE_MOD
                        if (seen) of_row[b] = score_mod(of_row[b], sequence, head, q_idx, j + key MOD_ARGS);
#endif
                        scores[b][a] = seen ? of_row[b] : -INFINITY;
                        top[a] = fmax(top[a], scores[b][a]);
                    }
                }
#if VALUES_IN_PLACE
                barrier(CLK_LOCAL_MEM_FENCE);
#endif
                store_rows(top, parts + tx * BLOCK_M + own);
                barrier(CLK_LOCAL_MEM_FENCE);

#if !VALUES_IN_PLACE
                stage_values(KV_TILES_AT(v_cache, row), kv, slice, n_keys, lid);
#endif
#pragma unroll
                for (int a = 0; a < ROWS; ++a) top[a] = m[a];
#pragma unroll 4  // keeps few values in registers
                for (int i = 0; i < TX; ++i) {
                    float other[ROWS];
                    load_rows(other, parts + i * BLOCK_M + own);
#pragma unroll
                    for (int a = 0; a < ROWS; ++a) top[a] = fmax(top[a], other[a]);
                }
#pragma unroll
                for (int a = 0; a < ROWS; ++a) {
                    const float shrink = softmax_weight(m[a], top[a]);
                    m[a] = top[a];
                    l[a] *= shrink;
#pragma unroll
                    for (int c = 0; c < RUNS; ++c) acc[a][c] *= shrink;
#pragma unroll
                    for (int b = 0; b < KEYS; ++b) {
                        scores[b][a] = softmax_weight(scores[b][a], top[a]);
                        l[a] += scores[b][a];
                    }
                }
#if VALUES_IN_PLACE
                barrier(CLK_LOCAL_MEM_FENCE);
#endif
#pragma unroll
                for (int b = 0; b < KEYS; ++b)
                    store_rows(scores[b], p + (KEYS * tx + b) * ROW_STRIDE + P_ROWS(KEYS * tx + b));
                barrier(CLK_LOCAL_MEM_FENCE);

#if VALUES_IN_PLACE
                __global const kv_t* values = KV_TILES_AT(v_cache, row) + slice + tx * COLUMN_RUN;
#endif
#pragma unroll KEYS_AT_ONCE
                for (int i = 0; i < n_keys; ++i) {
                    columns_t value[RUNS];
#pragma unroll
                    for (int c = 0; c < RUNS; ++c)
#if VALUES_IN_PLACE
                        value[c] = VALUES_AT(values + i * HEAD_DIM + c * TX * COLUMN_RUN);
#else
                        value[c] = COLUMNS_AT(kv + i * DV_TILE + COLUMN_OF(c));
#endif
                    float weight[ROWS];
                    load_rows(weight, p + i * ROW_STRIDE + P_ROWS(i));
#pragma unroll
                    for (int a = 0; a < ROWS; ++a)
#pragma unroll
                        for (int c = 0; c < RUNS; ++c) acc[a][c] += weight[a] * value[c];
                }
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);  // a last tile's maxima have been read
        store_rows(l, parts + tx * BLOCK_M + own);
        barrier(CLK_LOCAL_MEM_FENCE);
#pragma unroll
        for (int a = 0; a < ROWS; ++a) {
            const int t = t0 + own + a;
            if (t >= n) continue;
            float sum = 0.0f;
            for (int i = 0; i < TX; ++i) sum += parts[i * BLOCK_M + own + a];
#if LSE
            if (slice == 0 && tx == 0)
                lse[((size_t)batch * N_Q_HEADS + head) * n + t] = LOG_SUM(m[a], sum, head);
#endif
            if (slice == 0 && tx == 0) KEEP_MAX_SCORE(((size_t)batch * N_Q_HEADS + head) * n + t, m[a]);
            const float norm = OUTPUT_NORM(m[a], sum, head);
#pragma unroll
            for (int c = 0; c < RUNS; ++c) {
                float values[COLUMN_RUN];
                STORE_COLUMNS(acc[a][c] * norm, values);
                for (int i = 0; i < COLUMN_RUN; ++i) out[output_of(batch, head, t, n, N_Q_HEADS) + slice + COLUMN_OF(c) + i] = values[i];
            }
        }
    }
}

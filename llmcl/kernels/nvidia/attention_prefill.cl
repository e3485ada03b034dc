// Flash attention for the tokens of a step on the matrix units of NVIDIA GPUs (sm_80 and later).
// Formula and arguments as in cpu/attention_prefill.cl. With a 16-bit cache, queries and softmax weights are rounded to the cache's
// type. With a float32 cache, an operand x is the sum of two tf32 numbers, h (x rounded) and x - h, and a product is the sum of
// three products, h h' + h (x' - h') + (x - h) h': results are as precise as float32 (Ootomo and Yokota, "Recovering single
// precision accuracy from Tensor Cores", 2022); values must be finite. Sums are float32.
//
// A work-group takes BLOCK_M query rows of one head, a warp 16 rows: a row's queries, scores, weights and output stay in registers;
// keys and values go through local memory, and the next keys are copied while values are multiplied. KEY_SPLITS warps have the same
// rows and BLOCK_N / KEY_SPLITS different keys per step; a row's states are merged at the end.
//
//   local memory, 16-byte pieces: key tile i, dimension d, piece c in K's row, key j, piece c in V's row:
//     16 bits  K  (i HEAD_DIM + d) 2 + (c ^ d / 4 % 2)           V  j HEAD_DIM / 8 + (c ^ j % 8)
//     32 bits  K  (i HEAD_DIM + d) 4 + (c ^ d / 2 % 2 * 2)       V  j HEAD_DIM / 4 + (c ^ j / 2 % 4 * 2)
//     K in arrays, key j, piece c in the row:  j pieces per row + (c ^ j % 8)
//
// With ARRAYS, queries, keys and values are KV [batch][heads][rows][HEAD_DIM], read in place: see
// nvidia/attention_arrays.cl.
//
// Index space: groups (N_Q_HEADS, ceil(n / BLOCK_M), batch) with 2 BLOCK_M KEY_SPLITS work-items; the longest rows come first.
// Build: KV (f16, bf16 or f32), HEAD_DIM (a multiple of 64), N_KV_HEADS, constants for query_address.cl, CAPACITY (a multiple of
// BLOCK_N), SCALE, KV_BLOCK_RANGES, LSE, BLOCK_M (32, 64 or 128), BLOCK_N (a multiple of 16 KEY_SPLITS), KEY_SPLITS, DV_TILE
// (HEAD_DIM).
// Local memory: two tiles with BLOCK_N HEAD_DIM values, at least 4 BLOCK_M HEAD_DIM (KEY_SPLITS - 1) bytes; 32 bytes for each row
// and further split. For pages of keys and values see kv_address.cl, for runs of several sequences query_block.cl.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(CAPACITY) || \
    !defined(SCALE) || !defined(BLOCK_M) || !defined(BLOCK_N) || !defined(Q_STRIDE) || !defined(KV_BLOCK_RANGES) || \
    !defined(LSE) || !defined(KEY_SPLITS) || !defined(STATE_POSITION) || !defined(STATE_N_TOKENS)
#error "nvidia/attention_prefill.cl needs the build constants named in its head"
#endif
#ifndef ARRAYS
#define ARRAYS 0
#endif
#ifndef OUT
#define OUT f32
#endif
#if (BLOCK_M != 32 && BLOCK_M != 64 && BLOCK_M != 128) || HEAD_DIM % 64 != 0
#error "nvidia/attention_prefill.cl: BLOCK_M is 32, 64 or 128, HEAD_DIM a multiple of 64"
#endif
#define BYTES_f32 4
#define BYTES_f16 2
#define BYTES_bf16 2
#include "common/common.cl"
#define KV_BYTES CAT(BYTES_, KV)
#include "nvidia/ptx.cl"
#include "common/online_softmax.cl"
#include "common/attention_mods.cl"
#include "common/kv_block_ranges.cl"
#include "common/kv_address.cl"
#include "nvidia/key_tiles.cl"
#include "nvidia/quick_exponent.cl"
#define QUICK_TANH (ARRAYS && KV_BYTES == 2)
#include "nvidia/fragment_scores.cl"
#include "nvidia/attention_arrays.cl"
#include "common/query_block.cl"

// With a slope along the keys, scores get their factors first, and keep them.
#define FIRST_SCALE ((float)(SCALE) * (HAS_KEY_SLOPE ? SCORE_UNIT * SCORE_FACTOR : 1.0f))
#define SPLIT_ITEMS (2 * BLOCK_M)
#define GROUP_ITEMS (SPLIT_ITEMS * KEY_SPLITS)
#define OWN_KEYS (BLOCK_N / KEY_SPLITS)  // keys per step and warp
#define PIECE (16 / KV_BYTES)  // values in 16 bytes
#define TILE_PIECES (BLOCK_N * HEAD_DIM / PIECE)

// A work-item copies every GROUP_ITEMS-th piece of a tile: `from` is the first. swapped_key_piece or swapped_value_piece give the
// place in local memory; COPY_ROWS rows further on, the swap is the same.
#define COPIES (TILE_PIECES / GROUP_ITEMS)
#define ROW_PIECES (HEAD_DIM / PIECE)
#if GROUP_ITEMS / ROW_PIECES % 8 != 0 || TILE_PIECES % GROUP_ITEMS != 0
#error "nvidia/attention_prefill.cl: a work-group copies a multiple of 8 rows of values at once, and whole tiles"
#endif
#if OWN_KEYS % 16 != 0
#error "nvidia/attention_prefill.cl: BLOCK_N is a multiple of 16 KEY_SPLITS"
#endif
#define COPY_ROWS (GROUP_ITEMS / ROW_PIECES)  // rows copied at once by all work-items
inline int swapped_key_piece(const int piece) {
    return piece ^ (ARRAYS ? piece / ROW_PIECES & 7 : KV_BYTES == 4 ? (piece >> 2) & 2 : (piece >> 3) & 1);
}
inline int swapped_value_piece(const int piece) { return piece ^ (piece / ROW_PIECES & (KV_BYTES == 4 ? 6 : 7)); }

#if !ARRAYS
inline void fetch_keys(const uint to, __global const CAT(KV, _t)* from) {
#pragma unroll
    for (int i = 0; i < COPIES; ++i) copy16_async(to + i * GROUP_ITEMS * 16, from + i * GROUP_ITEMS * PIECE, true);
}
#endif

// Copies rows, `stride` values apart. Rows past the end become zero, because a weight of 0 times the cache's content there must be
// 0. key: the first piece's key.
inline void fetch_rows(const uint to, __global const CAT(KV, _t)* from, const int stride, const int key, const int n_keys) {
#pragma unroll
    for (int i = 0; i < COPIES; ++i)
        copy16_async(to + i * GROUP_ITEMS * 16, from + (long)stride * (i * COPY_ROWS), key + i * COPY_ROWS < n_keys);
}

// ---- a warp's products: 16 queries by OWN_KEYS keys, and 16 queries by HEAD_DIM value columns ----

#if KV_BYTES == 2
#define QUERY_PARTS (HEAD_DIM / 16)
typedef uint4 query_part;

// a, b: the lane's two rows.
inline query_part load_query(__global const QUERY_T* a, __global const QUERY_T* b, const int part, const int lane) {
    const int i = part * 16 + 2 * (lane % 4);
#if ARRAYS
    return (uint4)(load4_words(a + i), load4_words(b + i), load4_words(a + i + 8), load4_words(b + i + 8));
#else
    return (uint4)(CAT(narrow_, KV)(a[i], a[i + 1]), CAT(narrow_, KV)(b[i], b[i + 1]), CAT(narrow_, KV)(a[i + 8], a[i + 9]),
                   CAT(narrow_, KV)(b[i + 8], b[i + 9]));
#endif
}

inline void multiply_keys(float4* s, const query_part* q, const __local uint4* k_tile, const int lane) {
    const uint ks = local_address(k_tile);
#if ARRAYS
    const int row_of = (lane >> 4) * 8 + lane % 8, half_of = lane >> 3 & 1;
#else
    const int row_of = lane & 15, half_of = lane >> 4;
#endif
#pragma unroll
    for (int b = 0; b < OWN_KEYS / 16; ++b) {
        s[2 * b] = s[2 * b + 1] = 0;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; ++i) {
#if ARRAYS
            const uint4 k = load_matrices(ks + ((b * 16 + row_of) * ROW_PIECES + (2 * i + half_of ^ row_of & 7)) * 16);
#else
            const int d = i * 16 + row_of;
            const uint4 k = load_matrices_transposed(ks + ((b * HEAD_DIM + d) * 2 + (half_of ^ ((d >> 2) & 1))) * 16);
#endif
            CAT(mma_, KV)(&s[2 * b], q[i], k.x, k.y);
            CAT(mma_, KV)(&s[2 * b + 1], q[i], k.z, k.w);
        }
    }
}

inline void multiply_values(float4* acc, const float4* s, const __local uint4* v_tile, const int lane) {
    const uint vs = local_address(v_tile);
    const int row_of = lane & 15, half_of = lane >> 4;
#pragma unroll
    for (int b = 0; b < OWN_KEYS / 16; ++b) {
        const float4 left = s[2 * b], right = s[2 * b + 1];
        const uint4 p = (uint4)(CAT(narrow_weights_, KV)(left.x, left.y), CAT(narrow_weights_, KV)(left.z, left.w),
                                CAT(narrow_weights_, KV)(right.x, right.y), CAT(narrow_weights_, KV)(right.z, right.w));
        const int key = b * 16 + row_of;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; ++i) {
            const uint4 v = load_matrices_transposed(vs + (key * (HEAD_DIM / 8) + ((i * 2 + half_of) ^ (key & 7))) * 16);
            CAT(mma_, KV)(&acc[2 * i], p, v.x, v.y);
            CAT(mma_, KV)(&acc[2 * i + 1], p, v.z, v.w);
        }
    }
}
#else
#define QUERY_PARTS (HEAD_DIM / 8)
typedef float4 query_part;

inline query_part load_query(__global const QUERY_T* a, __global const QUERY_T* b, const int part, const int lane) {
    const int i = part * 8 + lane % 4;
    return (float4)(a[i], b[i], a[i + 4], b[i + 4]);
}

// c[n] += a[n parts / 8] b[n] for 8 blocks of 8 columns, term after term, so that no product waits for the previous
// product.
#define BLOCKS 8
inline void multiply_float32(float4* c, const float4* a, const float2* b, const int parts) {
    float4 high[BLOCKS];
    float2 b_high[BLOCKS];
#pragma unroll
    for (int i = 0; i < parts; ++i) high[i] = near_tf32_4(a[i]);
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) b_high[n] = near_tf32_2(b[n]);
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) mma_tf32(&c[n], a[n * parts / BLOCKS] - high[n * parts / BLOCKS], b_high[n]);
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) mma_tf32(&c[n], high[n * parts / BLOCKS], b[n] - b_high[n]);
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) mma_tf32(&c[n], high[n * parts / BLOCKS], b_high[n]);
}

// Sums over every PARTS-th 8 dimensions stay separate until the end: this gives 8 independent blocks even if a warp has fewer.
#define KEY_BLOCKS (OWN_KEYS / 8)
#define PARTS (BLOCKS / KEY_BLOCKS)
inline void multiply_keys(float4* s, const query_part* q, const __local uint4* k_tile, const int lane) {
    const int t = lane % 4, swapped = (t & 2) * 4;
#if ARRAYS
    const __local float* pieces[8];  // for the lane's key in 8, by piece of a row % 8
#pragma unroll
    for (int n = 0; n < 8; ++n) pieces[n] = (const __local float*)k_tile + lane / 4 * HEAD_DIM + (n ^ lane / 4) * 4 + t;
#else
    const __local float* lower = (const __local float*)k_tile + t * 16 + lane / 4 + swapped;  // keys 0 to 7 of 16
    const __local float* upper = (const __local float*)k_tile + t * 16 + lane / 4 + (8 ^ swapped);
#endif
    float4 sum[BLOCKS];
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) sum[n] = 0;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i += PARTS) {
        float2 k[BLOCKS];
#pragma unroll
        for (int n = 0; n < BLOCKS; ++n) {
            const int block = n % KEY_BLOCKS, part = i + n / KEY_BLOCKS;
#if ARRAYS
            const int at = block * 8 * HEAD_DIM + part / 4 * 32;
            k[n] = (float2)(pieces[part % 4 * 2][at], pieces[part % 4 * 2 + 1][at]);
#else
            const __local float* key = (block % 2 ? upper : lower) + (block / 2 * HEAD_DIM + part * 8) * 16;
            k[n] = (float2)(key[0], key[4 * 16]);
#endif
        }
        multiply_float32(sum, q + i, k, PARTS);
    }
#pragma unroll
    for (int n = 0; n < KEY_BLOCKS; ++n) s[n] = sum[n];
#pragma unroll
    for (int n = KEY_BLOCKS; n < BLOCKS; ++n) s[n % KEY_BLOCKS] += sum[n];
}

// Within 8 keys the order of a sum is free: column t of the weight fragment is key 2 t, column t + 4 is key 2 t + 1, matching the
// lane's own scores. The matrix units truncate sums where float32 would round: they only compute sums within a step.
inline void multiply_values(float4* acc, const float4* s, const __local uint4* v_tile, const int lane) {
    const int t = lane % 4;
    const __local float* values[4];  // by block of 8 columns % 4
#pragma unroll
    for (int n = 0; n < 4; ++n)
        values[n] = (const __local float*)v_tile + 2 * t * HEAD_DIM + (n ^ t) * 8 + lane / 4;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i += BLOCKS) {
        float4 sum[BLOCKS];
#pragma unroll
        for (int n = 0; n < BLOCKS; ++n) sum[n] = 0;
#pragma unroll
        for (int b = 0; b < OWN_KEYS / 8; ++b) {
            float2 v[BLOCKS];
#pragma unroll
            for (int n = 0; n < BLOCKS; ++n) {
                const __local float* value = values[n % 4] + b * 8 * HEAD_DIM + (i + n) / 4 * 32;
                v[n] = (float2)(value[0], value[HEAD_DIM]);
            }
            const float4 p = s[b].xzyw;
            multiply_float32(sum, &p, v, 1);
        }
#pragma unroll
        for (int n = 0; n < BLOCKS; ++n) acc[i + n] += sum[n];
    }
}
#endif

__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1)))
void attention_prefill(__global const QUERY_T* queries, __global const int* state, __global const CAT(KV, _t)* k_cache,
                       __global const CAT(KV, _t)* v_cache, __global CAT(OUT, _t)* out, __global float* lse,
                       __global const int* ranges MAX_SCORES_PARAM SINKS_PARAM MOD_PARAMS) {
    __local uint4 tiles[2 * TILE_PIECES];
    __local uint4 *k_tile = tiles, *v_tile = tiles + TILE_PIECES;
    const int item = get_local_id(0), lane = item % WARP, warp = item % SPLIT_ITEMS / WARP;
    const int first_key = KEY_SPLITS == 1 ? 0 : item / SPLIT_ITEMS * OWN_KEYS;  // within a step
    const uint to_keys = local_address(k_tile + swapped_key_piece(item));
    const uint to_values = local_address(v_tile + swapped_value_piece(item));
    const int head = get_group_id(0), batch = get_group_id(2);
    const query_block block = query_block_at(state, LONGEST_FIRST((int)get_group_id(1), (int)get_num_groups(1)));
    const int t0 = block.t0, position = block.position, n = block.n;
    const int kv_head = head / (N_Q_HEADS / N_KV_HEADS), sequence = batch + MOD_SEQUENCE(block.state);
    const int key_of_item = item / ROW_PIECES;  // in a tile, for the item's first copied piece
    const int k_stride = ROW_STRIDE(KEYS), v_stride = ROW_STRIDE(VALUES);
    k_cache += first_row(KEYS, batch, kv_head);
    v_cache += first_row(VALUES, batch, kv_head);
#if ARRAYS
    k_cache += (long)key_of_item * k_stride + item % ROW_PIECES * PIECE;
    v_cache += (long)key_of_item * v_stride + item % ROW_PIECES * PIECE;
    queries += first_row(QUERIES, batch, head);
#define FETCH_KEYS(row, n_keys) fetch_rows(to_keys, k_cache + (long)(row) * k_stride, k_stride, key_of_item, n_keys)
#else
    k_cache += item * PIECE;
    v_cache += item * PIECE;
    queries += first_query(batch, head, n, N_Q_HEADS, Q_STRIDE);
#define FETCH_KEYS(row, n_keys) fetch_keys(to_keys, k_cache + (size_t)(row) * HEAD_DIM)
#endif
    if (t0 >= n) return;

    // The lane's two rows, and its first of two columns in every 8.
    const int t_first = t0 + warp * 16 + lane / 4, column = 2 * (lane % 4);
    const int rows[2] = {min(t_first, n - 1), min(t_first + 8, n - 1)};
    const int seen_rows[2] = {position + rows[0], position + rows[1]};
    query_part q[QUERY_PARTS];
#pragma unroll
    for (int i = 0; i < QUERY_PARTS; ++i)
        q[i] = load_query(queries + (size_t)rows[0] * ROW_STRIDE(QUERIES), queries + (size_t)rows[1] * ROW_STRIDE(QUERIES), i, lane);
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f};  // l: the lane's columns only
    float4 acc[HEAD_DIM / 8];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; ++i) acc[i] = 0;

    const int2 group_rows = (int2)(position + t0, position + min(t0 + BLOCK_M, n) - 1);
    kv_block_ranges left = RANGES_OF(sequence, head, t0 / BLOCK_M, group_rows, position + min(t0 + BLOCK_M, n));
#define TILE_AFTER(at) tile_after(at, &left, sequence, head, group_rows MOD_ARGS)
#define PAGE_OF(tile) (tile.range.y > 0 ? kv_page(block.state, tile.j) : 0)
    tile_coord tile = {0, (int2)(0)};
    tile = TILE_AFTER(tile);
    if (tile.range.y > 0) {
        int row = kv_row(block.state, tile.j);
        tile_coord next = TILE_AFTER(tile);
        int next_page = PAGE_OF(next);
        FETCH_KEYS(row, tile.range.y - tile.j);
        copy_commit();
        while (tile.range.y > 0) {
            const int j = tile.j, n_keys = min(BLOCK_N, tile.range.y - j);
            const int seen_as = class_of(tile, sequence, head, group_rows MOD_ARGS);
            fetch_rows(to_values, v_cache + (long)row * v_stride, v_stride, key_of_item, n_keys);
            copy_commit();
            // The page is requested a step before the address is needed.
            const int next_row = opaque(row_in_page(next_page, next.j));
            const tile_coord after_next = TILE_AFTER(next);
            next_page = PAGE_OF(after_next);
            COPY_WAIT(1);
            barrier(CLK_LOCAL_MEM_FENCE);
            float4 s[OWN_KEYS / 8];
            multiply_keys(s, q, k_tile + first_key * HEAD_DIM / PIECE, lane);
            barrier(CLK_LOCAL_MEM_FENCE);
            if (next.range.y > 0) FETCH_KEYS(next_row, next.range.y - next.j);
            copy_commit();

            float* scores = (float*)s;
            const bool whole =
                seen_as == TILE_FULL && (KV_BLOCK_RANGES ? n_keys == BLOCK_N : j + BLOCK_N <= position + t0 + warp * 16 + 1);
#pragma unroll
            for (int i = 0; i < OWN_KEYS / 2; ++i) scores[i] *= FIRST_SCALE;
            const row_terms terms = terms_of(1.0f / SCORE_FACTOR, sequence, head, seen_rows, j + first_key + column MOD_ARGS);
            if (HAS_SCORE_MOD || !whole)
                modify_scores(scores, OWN_KEYS / 2, terms, SCORE_UNIT, SCORE_FACTOR, sequence, head, seen_rows,
                              j + first_key + column, j + n_keys, seen_as, whole MOD_ARGS);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float top = -INFINITY;
#pragma unroll
                for (int i = 0; i < OWN_KEYS / 8; ++i) top = fmax(top, fmax(scores[4 * i + 2 * h], scores[4 * i + 2 * h + 1]));
                top += terms.bias[h];  // bias differs between the lanes of a row
                top = fmax(top, shuffle_xor(top, 1));
                top = fmax(m[h], fmax(top, shuffle_xor(top, 2)));
                const float shrink = softmax_weight(m[h], top);
                const float from = (top == -INFINITY ? 0.0f : top) - terms.bias[h];
                m[h] = top;
                l[h] *= shrink;
#pragma unroll
                for (int i = 0; i < OWN_KEYS / 8; ++i) {
                    const float a = quick_weight(scores[4 * i + 2 * h], from), b = quick_weight(scores[4 * i + 2 * h + 1], from);
                    scores[4 * i + 2 * h] = a;
                    scores[4 * i + 2 * h + 1] = b;
                    l[h] += a + b;
                }
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 8; ++i) {
                    float* o = (float*)&acc[i];
                    o[2 * h] *= shrink;
                    o[2 * h + 1] *= shrink;
                }
            }
            COPY_WAIT(1);
            barrier(CLK_LOCAL_MEM_FENCE);
            multiply_values(acc, s, v_tile + first_key * HEAD_DIM / PIECE, lane);
            barrier(CLK_LOCAL_MEM_FENCE);
            tile = next;
            row = next_row;
            next = after_next;
        }
    }
#if KEY_SPLITS > 1
    // Warps with other keys hand over their states, work-item by work-item.
    __local float4 states[GROUP_ITEMS - SPLIT_ITEMS];
    __local float4* sums = (__local float4*)tiles + item % SPLIT_ITEMS;
    const int split = item / SPLIT_ITEMS;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (split > 0) {
        states[item - SPLIT_ITEMS] = (float4)(m[0], m[1], l[0], l[1]);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i) sums[((split - 1) * (HEAD_DIM / 8) + i) * SPLIT_ITEMS] = acc[i];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (split > 0) return;
#pragma unroll
    for (int other = 0; other < KEY_SPLITS - 1; ++other) {
        const float4 state = states[other * SPLIT_ITEMS + item];
        const float2 top = fmax((float2)(m[0], m[1]), state.xy);
        const float2 own = (float2)(softmax_weight(m[0], top.x), softmax_weight(m[1], top.y));
        const float2 its = (float2)(softmax_weight(state.x, top.x), softmax_weight(state.y, top.y));
        m[0] = top.x;
        m[1] = top.y;
        l[0] = l[0] * own.x + state.z * its.x;
        l[1] = l[1] * own.y + state.w * its.y;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i)
            acc[i] = acc[i] * own.xxyy + sums[(other * (HEAD_DIM / 8) + i) * SPLIT_ITEMS] * its.xxyy;
    }
#endif
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float sum = l[h] + shuffle_xor(l[h], 1);
        sum += shuffle_xor(sum, 2);
        const int t = t_first + 8 * h;
        if (t >= n) continue;
#if LSE
        if (lane % 4 == 0)
            lse[((size_t)batch * N_Q_HEADS + head) * n + t] = LOG_SUM(m[h], sum, head);
#endif
        if (lane % 4 == 0) KEEP_MAX_SCORE(((size_t)batch * N_Q_HEADS + head) * n + t, m[h]);
        const float norm = OUTPUT_NORM(m[h], sum, head);
        __global CAT(OUT, _t)* y = out + output_of(batch, head, t, n, N_Q_HEADS) + column;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i) {
            const float* o = (const float*)&acc[i];
            CAT(store_pair_, OUT)(y + i * 8, o[2 * h] * norm, o[2 * h + 1] * norm);
        }
    }
}

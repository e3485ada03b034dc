// Flash attention for the tokens of a step on the matrix units of NVIDIA GPUs (sm_80 and later).
// Formula and arguments as in cpu/attention_prefill.cl; queries and softmax weights are rounded to the cache's 16 bits,
// sums are float32.
//
// A work-group of 4 warps takes BLOCK_M = 64 query rows of one head, a warp 16 of them: queries, scores, weights and output
// of a row stay in its registers; keys and values go through local memory, the next keys while the values are multiplied.
//
//            local memory, 16-byte pieces:  K  key tile i, dimension d, half c at (i HEAD_DIM + d) 2 + (c ^ (d / 4) % 2)
//                                           V  key j, piece c at j HEAD_DIM / 8 + (c ^ j % 8)
//
// Index space: groups (N_Q_HEADS, ceil(n / BLOCK_M), batch) of 128; the longest rows are taken first.
// Build: KV (f16 or bf16), HEAD_DIM (a multiple of 64), N_KV_HEADS, those of query_address.cl, CAPACITY (a multiple of BLOCK_N),
// SCALE, BLOCK_LISTS, LSE, BLOCK_M (64), BLOCK_N (a multiple of 16), DV_TILE (HEAD_DIM).
// Local memory: 4 BLOCK_N HEAD_DIM bytes. For pages of keys and values see kv_address.cl.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(CAPACITY) || \
    !defined(SCALE) || !defined(BLOCK_M) || !defined(BLOCK_N) || !defined(Q_STRIDE) || !defined(BLOCK_LISTS) || \
    !defined(LSE) || !defined(STATE_POSITION) || !defined(STATE_N_TOKENS)
#error "nvidia/attention_prefill.cl needs the build constants named in its head"
#endif
#if BLOCK_M != 64 || HEAD_DIM % 64 != 0
#error "nvidia/attention_prefill.cl: BLOCK_M is 64, HEAD_DIM a multiple of 64"
#endif
#include "common.cl"
#include "nvidia/ptx.cl"
#include "online_softmax.cl"
#include "attention_mods.cl"
#include "block_list.cl"
#include "kv_address.cl"
#include "query_address.cl"

#define GROUP_ITEMS 128
#define TILE_PIECES (BLOCK_N * HEAD_DIM / 8)

// exp(a - b) as the special function unit gives it: far below the rounding of a weight to 16 bits.
inline float quick_weight(const float score, const float top) {
    return score == -INFINITY ? 0.0f : native_exp(score - top);
}

inline void fetch_keys(const uint to, __global const CAT(KV, _t)* tile) {
#pragma unroll
    for (int piece = get_local_id(0); piece < TILE_PIECES; piece += GROUP_ITEMS)
        copy16_async(to + (piece ^ ((piece >> 3) & 1)) * 16, tile + piece * 8, true);
}

// Rows past the last key become zero: a weight of 0 times whatever the cache holds there must be 0.
inline void fetch_values(const uint to, __global const CAT(KV, _t)* tile, const int n_keys) {
#pragma unroll
    for (int piece = get_local_id(0); piece < TILE_PIECES; piece += GROUP_ITEMS) {
        const int key = piece / (HEAD_DIM / 8);
        copy16_async(to + (piece ^ (key & 7)) * 16, tile + piece * 8, key < n_keys);
    }
}

// The first tile at or after `from` that a query of the group sees a key of.
inline int next_tile(const int batch, const int head, const int2 rows, int from, const int end, const bool partial MOD_PARAMS) {
#if HAS_MASK_MOD
    if (partial)
        while (from < end && tile_class(batch, head, 1, rows, from, min(from + BLOCK_N, end) MOD_ARGS) == TILE_HIDDEN)
            from += BLOCK_N;
#endif
    return from;
}

__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1)))
void attention_prefill(__global const float* queries, __global const int* state, __global const CAT(KV, _t)* k_cache,
                       __global const CAT(KV, _t)* v_cache, __global float* out, __global float* lse,
                       __global const int* blocks MOD_PARAMS) {
    __local uint4 k_tile[TILE_PIECES], v_tile[TILE_PIECES];
    const uint ks = local_address(k_tile), vs = local_address(v_tile);
    const int lane = get_local_id(0) % WARP, warp = get_local_id(0) / WARP;
    const int head = get_group_id(0), batch = get_group_id(2);
    const int t0 = (get_num_groups(1) - 1 - get_group_id(1)) * BLOCK_M;
    const int position = state[STATE_POSITION], n = state[STATE_N_TOKENS];
    const int kv_head = head / (N_Q_HEADS / N_KV_HEADS);
    k_cache += ((size_t)batch * N_KV_HEADS + kv_head) * CAPACITY * HEAD_DIM;
    v_cache += ((size_t)batch * N_KV_HEADS + kv_head) * CAPACITY * HEAD_DIM;
    queries += first_query(batch, head, n);
    if (t0 >= n) return;

    // The lane's two rows, and the first of its two columns in every 8.
    const int t_first = t0 + warp * 16 + lane / 4, column = 2 * (lane % 4);
    const int rows[2] = {min(t_first, n - 1), min(t_first + 8, n - 1)};
    uint4 q[HEAD_DIM / 16];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i) {
        __global const float* a = queries + (size_t)rows[0] * Q_STRIDE + i * 16 + column;
        __global const float* b = queries + (size_t)rows[1] * Q_STRIDE + i * 16 + column;
        q[i] = (uint4)(CAT(narrow_, KV)(a[0], a[1]), CAT(narrow_, KV)(b[0], b[1]), CAT(narrow_, KV)(a[8], a[9]),
                       CAT(narrow_, KV)(b[8], b[9]));
    }
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f};  // l: of the lane's columns only
    float4 acc[HEAD_DIM / 8];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; ++i) acc[i] = 0;

    const int row_of = lane & 15, half_of = lane >> 4;
    const int2 group_rows = (int2)(position + t0, position + min(t0 + BLOCK_M, n) - 1);
#if BLOCK_LISTS
    const block_list list = find_blocks(blocks, batch, head, t0, N_KEYS);
    const int n_blocks = list.n_partial + list.n_full;
#else
    const int n_blocks = 1;
#endif
    for (int block = 0; block < n_blocks; ++block) {
#if BLOCK_LISTS
        const int2 keys = block_keys(list, block);
        const bool partial = block < list.n_partial;
#else
        const int end = position + min(t0 + BLOCK_M, n);  // keys that the last row sees
        const int2 keys = (int2)(first_visible(batch, head, 1, group_rows, end, BLOCK_N MOD_ARGS), end);
        const bool partial = true;
#endif
#define NEXT_TILE(from) next_tile(batch, head, group_rows, from, keys.y, partial MOD_ARGS)
        int j = NEXT_TILE(keys.x);
        if (j >= keys.y) continue;
        int row = kv_row(state, j);
        barrier(CLK_LOCAL_MEM_FENCE);
        fetch_keys(ks, k_cache + (size_t)row * HEAD_DIM);
        copy_commit();
        while (j < keys.y) {
            const int n_keys = min(BLOCK_N, keys.y - j);
            const int seen_as = partial ? tile_class(batch, head, 1, group_rows, j, j + n_keys MOD_ARGS) : TILE_VISIBLE;
            fetch_values(vs, v_cache + (size_t)row * HEAD_DIM, n_keys);
            copy_commit();
            // Looked up before the scores are computed, so that its latency is hidden behind them.
            const int next = NEXT_TILE(j + BLOCK_N);
            const int next_row = next < keys.y ? kv_row(state, next) : 0;
            COPY_WAIT(1);
            barrier(CLK_LOCAL_MEM_FENCE);
            float4 s[BLOCK_N / 8];
#pragma unroll
            for (int b = 0; b < BLOCK_N / 16; ++b) {
                s[2 * b] = s[2 * b + 1] = 0;
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 16; ++i) {
                    const int d = i * 16 + row_of;
                    const uint4 k = load_matrices_transposed(ks + ((b * HEAD_DIM + d) * 2 + (half_of ^ ((d >> 2) & 1))) * 16);
                    CAT(mma_, KV)(&s[2 * b], q[i], k.x, k.y);
                    CAT(mma_, KV)(&s[2 * b + 1], q[i], k.z, k.w);
                }
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            if (next < keys.y) fetch_keys(ks, k_cache + (size_t)next_row * HEAD_DIM);
            copy_commit();

#if BLOCK_LISTS
            const bool whole = seen_as == TILE_VISIBLE && n_keys == BLOCK_N;
#else
            const bool whole = seen_as == TILE_VISIBLE && j + BLOCK_N <= position + t0 + warp * 16 + 1;
#endif
            float* scores = (float*)s;
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; ++i) {
                scores[i] *= SCALE;
                if (HAS_SCORE_MOD || !whole) {
                    const int q_idx = position + rows[i / 2 % 2], key = i / 4 * 8 + column + i % 2;
#if BLOCK_LISTS
                    bool seen = key < n_keys;
#else
                    bool seen = j + key <= q_idx;
#endif
#if HAS_MASK_MOD
                    if (seen && seen_as == TILE_MIXED) seen = mask_mod(batch, head, q_idx, j + key MOD_ARGS);
#endif
#if HAS_SCORE_MOD
                    if (seen) scores[i] = score_mod(scores[i], batch, head, q_idx, j + key MOD_ARGS);
#endif
                    if (!seen) scores[i] = -INFINITY;
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float top = m[h];
#pragma unroll
                for (int i = 0; i < BLOCK_N / 8; ++i) top = fmax(top, fmax(scores[4 * i + 2 * h], scores[4 * i + 2 * h + 1]));
                top = fmax(top, shuffle_xor(top, 1));
                top = fmax(top, shuffle_xor(top, 2));
                const float shrink = softmax_weight(m[h], top);
                m[h] = top;
                l[h] *= shrink;
#pragma unroll
                for (int i = 0; i < BLOCK_N / 8; ++i) {
                    const float a = quick_weight(scores[4 * i + 2 * h], top), b = quick_weight(scores[4 * i + 2 * h + 1], top);
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
#pragma unroll
            for (int b = 0; b < BLOCK_N / 16; ++b) {
                const float4 left = s[2 * b], right = s[2 * b + 1];
                const uint4 p = (uint4)(CAT(narrow_, KV)(left.x, left.y), CAT(narrow_, KV)(left.z, left.w),
                                        CAT(narrow_, KV)(right.x, right.y), CAT(narrow_, KV)(right.z, right.w));
                const int key = b * 16 + row_of;
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 16; ++i) {
                    const uint4 v =
                        load_matrices_transposed(vs + (key * (HEAD_DIM / 8) + ((i * 2 + half_of) ^ (key & 7))) * 16);
                    CAT(mma_, KV)(&acc[2 * i], p, v.x, v.y);
                    CAT(mma_, KV)(&acc[2 * i + 1], p, v.z, v.w);
                }
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            j = next;
            row = next_row;
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float sum = l[h] + shuffle_xor(l[h], 1);
        sum += shuffle_xor(sum, 2);
        const int t = t_first + 8 * h;
        if (t >= n) continue;
#if LSE
        if (lane % 4 == 0)
            lse[((size_t)batch * N_Q_HEADS + head) * n + t] = sum > 0.0f ? m[h] + log(sum) : -INFINITY;
#endif
        const float norm = softmax_norm(sum);
        __global float* y = out + output_of(batch, head, t, n) + column;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i) {
            const float* o = (const float*)&acc[i];
            *(__global float2*)(y + i * 8) = (float2)(o[2 * h], o[2 * h + 1]) * norm;
        }
    }
}

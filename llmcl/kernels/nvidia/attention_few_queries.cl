// Attention of a few queries to keys and values in arrays (nvidia/attention_arrays.cl), on the matrix units of NVIDIA GPUs (sm_80
// and later): each key and value is read once for all query heads in a group.
//
//   out[b][h][t] = softmax(score_mod(SCALE q[b][h][t] K^T)) V over the keys in the ranges (kv_block_ranges.cl)
//
// Row r of a KV head is query r / GROUP_SIZE in query head r % GROUP_SIZE. A warp has 8 rows and a strided share of the CHUNK-key
// blocks. It takes 16 keys at a time, from memory into registers and on to the matrix units:
//
//   S^T = K Q^T   16 keys x 8 rows      A: a lane's 16 bytes of a key are 8 neighbouring dimensions; the order of dimensions in a
//                                       product is free, so the 16 bytes serve as the lane's part of two products
//   O^T += V^T P^T   16 columns x 8 rows   A: from 8 neighbouring columns of 2 keys, a lane makes its part of 4 products
//
// Queries and softmax weights are rounded to the 16-bit type of keys and values, sums are float32. Here the states of a group's
// warps are merged; attention_few_queries_merge merges the split states.
//
// queries, k, v, out, lse, state, sinks: see nvidia/attention_prefill.cl with ARRAYS
// part_ml  float [batch][N_Q_HEADS][n][N_SPLITS][2] (m, l), part_acc float [...][N_SPLITS][HEAD_DIM]: unused with a single split
//
// Index space: (N_SPLITS, N_KV_HEADS ceil(n GROUP_SIZE / 8), batch) groups of 32 WARPS; for the merge (N_Q_HEADS, n, batch) of HEAD_DIM / 2.
// Build: KV (f16 or bf16), HEAD_DIM (64, 128 or 256), N_Q_HEADS, N_KV_HEADS, SCALE, N_SPLITS, WARPS, OUT, LSE, ARRAYS (1), STRIDES,
// KV_BLOCK_RANGES (1) and the range constants. All queries use their batch's first record. For pages, a multiple of 16 keys each,
// see kv_address.cl. Local memory: WARPS (32 HEAD_DIM + 64) bytes.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(SCALE) || !defined(N_SPLITS) || \
    !defined(WARPS) || !defined(OUT) || !defined(LSE) || !defined(STATE_POSITION) || !defined(STATE_N_TOKENS) || !ARRAYS || \
    !KV_BLOCK_RANGES
#error "nvidia/attention_few_queries.cl needs the build constants named in its head"
#endif
#if HEAD_DIM % 64 != 0
#error "nvidia/attention_few_queries.cl: HEAD_DIM is a multiple of 64"
#endif
#include "common/common.cl"
#include "nvidia/ptx.cl"
#include "common/online_softmax.cl"
#include "common/attention_mods.cl"
#include "common/kv_block_ranges.cl"
#include "common/kv_address.cl"
#include "nvidia/attention_arrays.cl"
#include "nvidia/quick_exponent.cl"

#define ROWS 8
#define STEP 16
#define CHUNK 64
#define GROUP_SIZE (N_Q_HEADS / N_KV_HEADS)
#define KEY_PARTS (HEAD_DIM / 32)    // 16-byte parts per lane and key
#define VALUE_PARTS (HEAD_DIM / 64)  // 16-byte parts per lane and value

inline void store_value_f32(__global f32_t* y, const float v) { *y = v; }
inline void store_value_f16(__global f16_t* y, const float v) { *y = (f16_t)narrow_f16(v, 0.0f); }
inline void store_value_bf16(__global bf16_t* y, const float v) { *y = (bf16_t)narrow_bf16(v, 0.0f); }

// A warp's position in its rows' keys: 16 keys from j on. The warp takes every `stride`-th chunk, counted over all ranges. end: the
// chunk's end; range (0, 0): finished.
typedef struct {
    int j, end, stride;
    int2 range;
} key_place;

inline key_place place_from(int chunk, const int stride, int2 range, kv_block_ranges* left) {
    while (range.y > 0) {
        const int chunks = (range.y - RANGE_FIRST(range) + CHUNK - 1) / CHUNK;
        if (chunk < chunks) break;
        chunk -= chunks;
        range = take_range(left);
    }
    const int j = RANGE_FIRST(range) + chunk * CHUNK;
    key_place found = {j, min(j + CHUNK, range.y), stride, range};
    return found;
}

inline key_place place_after(key_place at, kv_block_ranges* left) {
    at.j += STEP;
    if (at.j < at.end || at.range.y == 0) return at;
    const int chunk = (at.j - 1 - RANGE_FIRST(at.range)) / CHUNK + at.stride;
    return place_from(chunk, at.stride, at.range, left);
}

#define PAGE_AT(at) ((at).range.y > 0 ? kv_page(state, (at).j) : 0)
#define ROW_AT(page, at) ((at).range.y > 0 ? row_in_page(page, (at).j) : 0)

// Loads the lane's parts of keys lane / 4 and lane / 4 + 8, from 16 keys at `row`, of which n_keys exist.
inline void load_keys(uint4 k[2][KEY_PARTS], __global const CAT(KV, _t)* keys, const int row, const int stride, const int n_keys,
                      const int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        __global const CAT(KV, _t)* from = keys + (long)(row + min(lane / 4 + 8 * h, n_keys - 1)) * stride + lane % 4 * 8;
#pragma unroll
        for (int c = 0; c < KEY_PARTS; ++c) k[h][c] = stream16(from + c * 32);
    }
}

// Loads the lane's parts of values 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, t = lane % 4.
inline void load_values(uint4 v[4][VALUE_PARTS], __global const CAT(KV, _t)* values, const int row, const int stride,
                        const int n_keys, const int lane) {
#pragma unroll
    for (int h = 0; h < 4; ++h) {
        const int key = lane % 4 * 2 + h % 2 + h / 2 * 8;
        __global const CAT(KV, _t)* from = values + (long)(row + min(key, n_keys - 1)) * stride + lane / 4 * 8;
#pragma unroll
        for (int c = 0; c < VALUE_PARTS; ++c) v[h][c] = stream16(from + c * 64);
    }
}

__kernel __attribute__((reqd_work_group_size(32 * WARPS, 1, 1)))
void attention_few_queries(__global const CAT(KV, _t)* queries, __global const int* state, __global const CAT(KV, _t)* k_cache,
                           __global const CAT(KV, _t)* v_cache, __global float* part_ml, __global float* part_acc,
                           __global CAT(OUT, _t)* out, __global float* lse, __global const int* ranges MAX_SCORES_PARAM
                               SINKS_PARAM MOD_PARAMS) {
    __local float accs[WARPS][ROWS][HEAD_DIM];
    __local float2 states[WARPS][ROWS];
    const int lane = get_local_id(0) % WARP, warp = get_local_id(0) / WARP, g = lane / 4, t = lane % 4;
    const int split = get_group_id(0), batch = get_group_id(2);
    const int position = state[STATE_POSITION], n = state[STATE_N_TOKENS], n_rows = n * GROUP_SIZE;
    const int kv_head = get_group_id(1) % N_KV_HEADS, first = get_group_id(1) / N_KV_HEADS * ROWS;
    const int k_stride = ROW_STRIDE(KEYS), v_stride = ROW_STRIDE(VALUES);
    k_cache += first_row(KEYS, batch, kv_head);
    v_cache += first_row(VALUES, batch, kv_head);

    uint4 q[KEY_PARTS];
    {
        const int row = min(first + g, n_rows - 1);
        __global const CAT(KV, _t)* from = queries + first_row(QUERIES, batch, kv_head * GROUP_SIZE + row % GROUP_SIZE) +
                                           (long)(row / GROUP_SIZE) * ROW_STRIDE(QUERIES) + t * 8;
#pragma unroll
        for (int c = 0; c < KEY_PARTS; ++c) q[c] = load16_words(from + c * 32);
    }
    // The lane's two rows, for the mods.
    int q_idx[2], heads[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = min(first + 2 * t + i, n_rows - 1);
        q_idx[i] = position + row / GROUP_SIZE;
        heads[i] = kv_head * GROUP_SIZE + row % GROUP_SIZE;
    }
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f};  // l: the lane's keys only
    float4 acc[VALUE_PARTS * 4];
#pragma unroll
    for (int i = 0; i < VALUE_PARTS * 4; ++i) acc[i] = 0;

    kv_block_ranges left = RANGES_OF(batch, 0, 0, (int2)(0), 0);
    const int2 first_range = take_range(&left);
    key_place at = place_from(split * WARPS + warp, N_SPLITS * WARPS, first_range, &left);
    if (at.range.y > 0) {
        uint4 k[2][KEY_PARTS], v[4][VALUE_PARTS];
        int row = ROW_AT(PAGE_AT(at), at);
        key_place next = place_after(at, &left);
        int next_page = PAGE_AT(next);
        load_keys(k, k_cache, row, k_stride, at.range.y - at.j, lane);
        while (at.range.y > 0) {
            const int n_keys = at.range.y - at.j, next_row = ROW_AT(next_page, next);
            load_values(v, v_cache, row, v_stride, n_keys, lane);
            float4 s = 0;
#pragma unroll
            for (int c = 0; c < KEY_PARTS; ++c) {
                CAT(mma_, KV)(&s, (uint4)(k[0][c].x, k[1][c].x, k[0][c].y, k[1][c].y), q[c].x, q[c].y);
                CAT(mma_, KV)(&s, (uint4)(k[0][c].z, k[1][c].z, k[0][c].w, k[1][c].w), q[c].z, q[c].w);
            }
            if (next.range.y > 0) load_keys(k, k_cache, next_row, k_stride, next.range.y - next.j, lane);
            const key_place after_next = place_after(next, &left);
            next_page = PAGE_AT(after_next);  // requested a step before the address is needed

            // s: key g for rows 2 t and 2 t + 1, then key g + 8.
            float scores[4] = {s.x * (float)(SCALE), s.y * (float)(SCALE), s.z * (float)(SCALE), s.w * (float)(SCALE)};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = g + i / 2 * 8, kv_idx = at.j + min(key, n_keys - 1);
#if HAS_SCORE_MOD
                scores[i] = score_mod(scores[i], batch, heads[i % 2], q_idx[i % 2], kv_idx MOD_ARGS);
#endif
                bool seen = key < n_keys;
#if HAS_MASK_MOD
                if (at.range.x & 1) seen = seen && mask_mod(batch, heads[i % 2], q_idx[i % 2], kv_idx MOD_ARGS);
#endif
                if (!seen) scores[i] = -INFINITY;
            }
            float shrink[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float top = fmax(scores[i], scores[i + 2]);
                top = fmax(top, shuffle_xor(top, 4));
                top = fmax(top, shuffle_xor(top, 8));
                top = fmax(m[i], fmax(top, shuffle_xor(top, 16)));
                shrink[i] = quick_weight(m[i], top);
                m[i] = top;
                scores[i] = quick_weight(scores[i], top);
                scores[i + 2] = quick_weight(scores[i + 2], top);
                l[i] = l[i] * shrink[i] + (scores[i] + scores[i + 2]);
            }
            if (warp_any(shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
                for (int i = 0; i < VALUE_PARTS * 4; ++i) acc[i] *= (float4)(shrink[0], shrink[1], shrink[0], shrink[1]);
            }
            const uint p0 = transpose_matrix(CAT(narrow_weights_, KV)(scores[0], scores[1]));
            const uint p1 = transpose_matrix(CAT(narrow_weights_, KV)(scores[2], scores[3]));
#pragma unroll
            for (int i = 0; i < VALUE_PARTS * 4; ++i) {
                const uint a = word_of(v[0][i / 4], i % 4), b = word_of(v[1][i / 4], i % 4);
                const uint c = word_of(v[2][i / 4], i % 4), d = word_of(v[3][i / 4], i % 4);
                CAT(mma_, KV)(&acc[i], (uint4)(permute(a, b, 0x5410), permute(a, b, 0x7632), permute(c, d, 0x5410),
                                               permute(c, d, 0x7632)), p0, p1);
            }
            at = next;
            row = next_row;
            next = after_next;
        }
    }

    // acc[4 c + i]: columns 64 c + 8 g + 2 i for rows 2 t and 2 t + 1, then the following columns.
#pragma unroll
    for (int i = 0; i < 2; ++i)
        for (int mask = 4; mask <= 16; mask *= 2) l[i] += shuffle_xor(l[i], mask);
    if (g == 0) {
        states[warp][2 * t] = (float2)(m[0], l[0]);
        states[warp][2 * t + 1] = (float2)(m[1], l[1]);
    }
#pragma unroll
    for (int i = 0; i < VALUE_PARTS * 4; ++i) {
        const int column = i / 4 * 64 + g * 8 + i % 4 * 2;
        *(__local float2*)&accs[warp][2 * t][column] = acc[i].xz;
        *(__local float2*)&accs[warp][2 * t + 1][column] = acc[i].yw;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int r = warp; r < ROWS && first + r < n_rows; r += WARPS) {
        const int row = first + r, head = kv_head * GROUP_SIZE + row % GROUP_SIZE;
        const size_t place = ((size_t)batch * N_Q_HEADS + head) * n + row / GROUP_SIZE;
        float top = -INFINITY, sum = 0.0f, weights[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmax(top, states[w][r].x);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            weights[w] = quick_weight(states[w][r].x, top);
            sum += weights[w] * states[w][r].y;
        }
        const float norm = N_SPLITS == 1 ? OUTPUT_NORM(top, sum, head) : 1.0f;
        for (int d = lane; d < HEAD_DIM; d += WARP) {
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) total += weights[w] * accs[w][r][d];
#if N_SPLITS == 1
            CAT(store_value_, OUT)(out + place * HEAD_DIM + d, total * norm);
#else
            part_acc[(place * N_SPLITS + split) * HEAD_DIM + d] = total;
#endif
        }
        if (lane == 0) {
#if N_SPLITS > 1
            *(__global float2*)(part_ml + (place * N_SPLITS + split) * 2) = (float2)(top, sum);
#else
#if LSE
            lse[place] = LOG_SUM(top, sum, head);
#endif
            KEEP_MAX_SCORE(place, top);
#endif
        }
    }
}

#if N_SPLITS > 1
// A work-item has two columns.
__kernel __attribute__((reqd_work_group_size(HEAD_DIM / 2, 1, 1)))
void attention_few_queries_merge(__global const float* part_ml, __global const float* part_acc, __global CAT(OUT, _t)* out,
                                 __global float* lse, __global const int* state MAX_SCORES_PARAM SINKS_PARAM) {
    const size_t row = ((size_t)get_group_id(2) * N_Q_HEADS + get_group_id(0)) * state[STATE_N_TOKENS] + get_group_id(1);
    const int d = get_local_id(0) * 2;
    __global const float2* of_splits = (__global const float2*)part_ml + row * N_SPLITS;
    float top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int s = 0; s < N_SPLITS; ++s) top = fmax(top, of_splits[s].x);
    float2 total = 0.0f;
#pragma unroll
    for (int s = 0; s < N_SPLITS; ++s) {
        const float weight = quick_weight(of_splits[s].x, top);
        sum += weight * of_splits[s].y;
        total += weight * *(__global const float2*)(part_acc + (row * N_SPLITS + s) * HEAD_DIM + d);
    }
    const float norm = OUTPUT_NORM(top, sum, get_group_id(0));
    CAT(store_pair_, OUT)(out + row * HEAD_DIM + d, total.x * norm, total.y * norm);
#if LSE
    if (d == 0) lse[row] = LOG_SUM(top, sum, get_group_id(0));
#endif
    if (d == 0) KEEP_MAX_SCORE(row, top);
}
#endif

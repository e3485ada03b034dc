// Attention for the tokens of a short prompt as a link in nvidia/few_rows_chain.cl. Rotates queries and keys, appends keys and
// values to the cache, attends to the cache and to the new tokens:
//
//   out[t][h] = softmax(SCALE q[t][h] K^T) V over the keys at positions up to the token's
//
// Row r of a KV head is query r / GROUP_SIZE in query head r % GROUP_SIZE. A warp has ROWS rows. A group's warps share the keys. First
// come the step's keys, from registers into local memory; the first split also appends them to the cache. Then come the cached keys. A
// split has a share of them, STAGE_KEYS at a time: the next stage is copied during a stage's products, and the first stage while the
// group waits. The matrix units do both products (mma.sync), with keys and values as the left operand. Queries and softmax weights are
// rounded to the cache's 16-bit type, as in prefill. With g = lane / 4, t = lane % 4, a lane has the scores of a tile's keys g and g +
// 8, and dimensions g and g + 8 in each 16, for rows 2 t and 2 t + 1. A head's last group for a block of rows merges the split states.
//
// Local memory, in 16-byte pieces: key tile i, dimension d, half h of the 16 keys: (i HEAD_DIM + d) 2 + (h ^ d / 4 % 2); value j, 8
// dimensions c: j HEAD_DIM / 8 + (c ^ j % 8). Eight neighbours read together then lie in different banks.
//
// qkv       float [n][N_Q_HEADS + 2 N_KV_HEADS][HEAD_DIM]        rope  float [n][HEAD_DIM], see rope_append.cl
// part_ml   float [n GROUP_SIZE N_KV_HEADS][N_SPLITS][2]: m and l; part_acc: the same with [HEAD_DIM]
// out       see store_attended.cl
// arrivals  int [BLOCKS][N_KV_HEADS], 0 before and after: groups that have left their states
// sinks     float [N_Q_HEADS], with HAS_SINKS: see online_softmax.cl
//
// Groups: N_KV_HEADS by BLOCKS, ceil(n GROUP_SIZE / (ROWS WARPS)), by N_SPLITS. Build: KV (f16 or bf16), HEAD_DIM (a multiple of
// 64), N_Q_HEADS, N_KV_HEADS, CAPACITY, SCALE, MAX_ROWS (tokens per step), N_SPLITS (16 or 32), WARPS. Local memory: HEAD_DIM times
// 512 + 16 WARPS + 64 for each 16 tokens in a step. For pages of keys and values, a multiple of STAGE_KEYS each, see kv_address.cl.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(CAPACITY) || \
    !defined(SCALE) || !defined(MAX_ROWS) || !defined(N_SPLITS) || !defined(WARPS) || !defined(STATE_POSITION) || \
    !defined(STATE_N_TOKENS)
#error "nvidia/attention_short_prompt.cl needs the build constants named in its head"
#endif
#include "common/common.cl"
#include "nvidia/ptx.cl"
#include "common/online_softmax.cl"
#include "common/kv_address.cl"
#include "nvidia/quick_exponent.cl"
#include "nvidia/store_attended.cl"

#ifndef PACKED_OUT
#define PACKED_OUT 0
#endif
#define ROWS 8
#define KEY_TILE 16
#define STAGES 4
#define STAGE_KEYS 32
#define SPLIT_KEYS 64  // minimum keys before adding a split
#define MERGED 16      // row states requested at once
#define GROUP_SIZE (N_Q_HEADS / N_KV_HEADS)
#define ROW_VALUES ((N_Q_HEADS + 2 * N_KV_HEADS) * HEAD_DIM)
#define STEPS (HEAD_DIM / 16)
#define ROW_PIECES (HEAD_DIM / 8)
#define TILE_BYTES (KEY_TILE * HEAD_DIM * 2)
#define STAGE_BYTES (STAGE_KEYS * HEAD_DIM * 2)  // for keys, and for values
#define COPY_KEYS (LOCAL_SIZE / ROW_PIECES)      // keys copied at once by all work-items
#define NEW_TILES ((MAX_ROWS + KEY_TILE - 1) / KEY_TILE)
#define LOCAL_SIZE (WARP * WARPS)
#define NEW_EACH (NEW_TILES * KEY_TILE * (HEAD_DIM / 2) / LOCAL_SIZE)  // pairs of dimensions per work-item

#if HEAD_DIM % 64 || COPY_KEYS % 8
#error "nvidia/attention_short_prompt.cl: HEAD_DIM is a multiple of 64, of which the work-items copy eights of keys"
#endif

#define PAGE_AT(key) ((key) < end ? kv_page(state, key) : 0)

// The state of a lane's two rows. l: the lane's keys only.
typedef struct {
    float m[2], l[2];
    float4 acc[STEPS];
} row_states;

// Starts the copy of a head's keys and values from position `first` to before `end`; values past the end become zero. page: the
// page of the first key.
inline void copy_stage(const uint to, __global const CAT(KV, _t)* k_cache, __global const CAT(KV, _t)* v_cache, const int page,
                       const int first, const int end, const int lid) {
    if (first < end) {
        const size_t at = (size_t)row_in_page(page, first) * HEAD_DIM + lid * 8;
        const int key = first + lid / ROW_PIECES;
        const uint to_keys = to + (lid ^ (lid >> 3 & 1)) * 16, to_values = to + STAGE_BYTES + (lid ^ lid / ROW_PIECES % 8) * 16;
#pragma unroll
        for (int i = 0; i < STAGE_BYTES / 16 / LOCAL_SIZE; ++i) {  // further on by a multiple of 8 keys, so the swap is the same
            copy16_async(to_keys + i * LOCAL_SIZE * 16, k_cache + at + i * LOCAL_SIZE * 8, true);
            copy16_async(to_values + i * LOCAL_SIZE * 16, v_cache + at + i * LOCAL_SIZE * 8, key + i * COPY_KEYS < end);
        }
    }
    copy_commit();
}

// Adds a tile to the warp's states. seen: the number of keys visible to each of the lane's rows.
inline void attend_tile(row_states* s, __local const uint2 (*q)[WARP], const uint keys, const uint values, const int2 seen,
                        const int lane) {
    const int g = lane / 4, of_eight = lane % 8;
    // A lane names a row in one of four 8 x 8 matrices: 8 keys (lower or upper half) in a dimension, 8 dimensions in a value.
    const int dim = of_eight + lane / 16 * 8, half_row = (lane / 8 ^ dim / 4) & 1, key = of_eight + lane / 16 * 8;
    float4 products[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int i = 0; i < STEPS; i += 4) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint2 queries = q[i + j][lane];
            const uint4 of_keys = load_matrices_transposed(keys + ((i + j) * 16 + dim) * 32 + half_row * 16);
            CAT(mma_, KV)(&products[j % 2], of_keys, queries.x, queries.y);
        }
    }
    const float4 sums = (products[0] + products[1]) * (float)(SCALE);
    float scores[4] = {sums.x, sums.y, sums.z, sums.w};  // key g for both rows, then key g + 8
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int n_seen = i == 0 ? seen.x : seen.y;
        if (g >= n_seen) scores[i] = -INFINITY;
        if (g + 8 >= n_seen) scores[i + 2] = -INFINITY;
        float top = fmax(s->m[i], fmax(scores[i], scores[i + 2]));
        for (int other = 4; other < WARP; other *= 2) top = fmax(top, shuffle_xor(top, other));
        shrink[i] = quick_weight(s->m[i], top);
        s->m[i] = top;
        scores[i] = quick_weight(scores[i], top);
        scores[i + 2] = quick_weight(scores[i + 2], top);
        s->l[i] = s->l[i] * shrink[i] + (scores[i] + scores[i + 2]);
    }
    const uint p0 = transpose_matrix(CAT(narrow_weights_, KV)(scores[0], scores[1]));
    const uint p1 = transpose_matrix(CAT(narrow_weights_, KV)(scores[2], scores[3]));
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const int piece = i * 2 + (lane / 8 & 1);
        s->acc[i] *= (float4)(shrink[0], shrink[1], shrink[0], shrink[1]);
        CAT(mma_, KV)(&s->acc[i], load_matrices_transposed(values + (key * ROW_PIECES + (piece ^ of_eight)) * 16), p0, p1);
    }
}

// Requests the lane's part of a row's query.
inline void ask_query(float2 x[STEPS][2], __global const float* query, const int lane) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) x[i][h] = load_shared_float2(query + 16 * i + 8 * h + 2 * (lane % 4));
}

// Stores the fragments of a row's rotated query.
inline void put_query(__local uint2 (*q)[WARP], const float2 x[STEPS][2], __local const float* rope, const int lane) {
    rope += 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < STEPS / 2; ++i) {
        uint low[2], high[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float2 a = x[i][h], b = x[i + STEPS / 2][h];
            const float2 c = *(__local const float2*)(rope + 16 * i + 8 * h);
            const float2 sine = *(__local const float2*)(rope + HEAD_DIM / 2 + 16 * i + 8 * h);
            const float2 first = a * c - b * sine, second = b * c + a * sine;
            low[h] = CAT(narrow_, KV)(first.x, first.y);
            high[h] = CAT(narrow_, KV)(second.x, second.y);
        }
        q[i][lane] = (uint2)(low[0], low[1]);
        q[i + STEPS / 2][lane] = (uint2)(high[0], high[1]);
    }
}

// A work-item's share of the step's keys and values: pairs of dimensions `column` and HEAD_DIM / 2 further on.
typedef struct {
    float2 key[NEW_EACH], value[NEW_EACH];
    int row[NEW_EACH];  // cache row; negative: none
} new_pairs;
#define PAIR(i) (lid + (i) * LOCAL_SIZE)
#define TOKEN_OF(i) (PAIR(i) / (HEAD_DIM / 2))
#define COLUMN_OF(i) (PAIR(i) % (HEAD_DIM / 2))

// Finds the cache rows for the share.
inline void find_rows(new_pairs* of, __global const int* state, const bool append, const int lid) {
    const int position = state[STATE_POSITION], n = state[STATE_N_TOKENS];
#pragma unroll
    for (int i = 0; i < NEW_EACH; ++i) of->row[i] = append && TOKEN_OF(i) < n ? kv_row(state, position + TOKEN_OF(i)) : -1;
}

inline void ask_new(new_pairs* of, __global const float* keys, const int n, const int lid) {
#pragma unroll
    for (int i = 0; i < NEW_EACH; ++i) {
        __global const float* k = keys + min(TOKEN_OF(i), n - 1) * ROW_VALUES + COLUMN_OF(i);
        __global const float* v = k + N_KV_HEADS * HEAD_DIM;
        of->key[i] = (float2)(load_shared_float(k), load_shared_float(k + HEAD_DIM / 2));
        of->value[i] = (float2)(load_shared_float(v), load_shared_float(v + HEAD_DIM / 2));
    }
}

// Stores rotated keys and values in local memory, and also as words in the cache's type in `words`.
inline void put_new(uint2 words[NEW_EACH], __local uchar* to, const new_pairs* of, __local const float* rope, const int n,
                    const int lid) {
#pragma unroll
    for (int i = 0; i < NEW_EACH; ++i) {
        const int token = TOKEN_OF(i), place = token % KEY_TILE;
        const float2 key = of->key[i], value = of->value[i];
        __local const float* cosine = rope + min(token, n - 1) * HEAD_DIM + COLUMN_OF(i);
        const float c = cosine[0], sine = cosine[HEAD_DIM / 2];
        words[i].x = CAT(narrow_, KV)(key.x * c - key.y * sine, key.y * c + key.x * sine);
        words[i].y = token < n ? CAT(narrow_, KV)(value.x, value.y) : 0;  // a weight of 0 times the content must be 0
        __local ushort* tile = (__local ushort*)(to + token / KEY_TILE * 2 * TILE_BYTES);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int dim = COLUMN_OF(i) + h * (HEAD_DIM / 2);
            tile[dim * KEY_TILE + (place ^ dim / 4 % 2 * 8)] = (ushort)(words[i].x >> 16 * h);
            tile[TILE_BYTES / 2 + (place * ROW_PIECES + (dim / 8 ^ place % 8)) * 8 + dim % 8] = (ushort)(words[i].y >> 16 * h);
        }
    }
}

// Appends the words to the cache; k_head and v_head point at a KV head.
inline void append_new(__global CAT(KV, _t)* k_head, __global CAT(KV, _t)* v_head, const uint2 words[NEW_EACH], const new_pairs* of,
                       const int lid) {
#pragma unroll
    for (int i = 0; i < NEW_EACH; ++i) {
        const int row = of->row[i];
        if (row < 0) continue;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const size_t dim = COLUMN_OF(i) + h * (HEAD_DIM / 2);
            ((__global ushort*)k_head)[(size_t)(row - row % KEY_TILE) * HEAD_DIM + dim * KEY_TILE + row % KEY_TILE] =
                (ushort)(words[i].x >> 16 * h);
            ((__global ushort*)v_head)[(size_t)row * HEAD_DIM + dim] = (ushort)(words[i].y >> 16 * h);
        }
    }
}

#if PACKED_OUT
// Stores the output for a warp's rows from `first` on: a lane's sums for rows 2 t and 2 t + 1, times norms.
inline void store_rows(__global void* out, const float4 acc[STEPS], const float2 norms, const int head, const int first, const int n_rows,
                       const int lane) {
    const int row = first + lane / 4, token = row / GROUP_SIZE, column = (head * GROUP_SIZE + row % GROUP_SIZE) * HEAD_DIM;
    __global ushort* to = (__global ushort*)out + (size_t)(token / 8) * OUT_SIZE * 8 + column * 8 + token % 8 * 8 + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < 2 * STEPS; ++j) {
        const float2 sums = j % 2 == 0 ? acc[j / 2].xy : acc[j / 2].zw;  // dimension 8 j + g
        const uint word = transpose_matrix(CAT(narrow_, OUT)(sums.x * norms.x, sums.y * norms.y));
        if (row < n_rows) *(__global uint*)(to + j * 64) = word;
    }
}
#endif

// The work of a group: a split, a KV head and a block of rows. done, count: see few_rows_unit in nvidia/linear_few_rows.cl.
inline void attention_prompt_unit(const int split, const int head, const int block, __local uint4* memory,
                                  volatile __global const uint* done, const uint count, __global const float* qkv,
                                  __global const float* rope, __global const int* state, __global CAT(KV, _t)* k_cache,
                                  __global CAT(KV, _t)* v_cache, __global void* out, __global float* part_ml,
                                  __global float* part_acc, __global int* arrivals SINKS_PARAM) {
    const int lid = get_local_id(0), lane = lid % WARP, g = lane / 4, t = lane % 4;
    const int position = state[STATE_POSITION], n_rows = state[STATE_N_TOKENS] * GROUP_SIZE;
    const int n_splits = clamp((position + SPLIT_KEYS - 1) / SPLIT_KEYS, 1, N_SPLITS);
    if (split >= n_splits || block * ROWS * WARPS >= n_rows) return;
    const int first = (block * WARPS + lid / WARP) * ROWS;  // the warp's first row
    const int each = (position + n_splits * STAGE_KEYS - 1) / (n_splits * STAGE_KEYS) * STAGE_KEYS;
    const int from = min(split * each, position), end = min(from + each, position);
    const uint stages = local_address(memory);
    // The step's cosines and sines lie in the last stage until the stage is needed.
    __local const float* turns = (__local const float*)(memory + (STAGES - 1) * 2 * STAGE_BYTES / 16);
    for (int i = lid; i < n_rows / GROUP_SIZE * (HEAD_DIM / 4); i += LOCAL_SIZE)
        copy16_async(stages + (STAGES - 1) * 2 * STAGE_BYTES + i * 16, rope + i * 4, true);
    copy_commit();
    const size_t head_at = (size_t)head * CAPACITY * HEAD_DIM;
    __global const CAT(KV, _t)*k_head = k_cache + head_at, *v_head = v_cache + head_at;
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        const int key = from + i * STAGE_KEYS;
        copy_stage(stages + i * 2 * STAGE_BYTES, k_head, v_head, PAGE_AT(key), key, end, lid);
    }
    int page = PAGE_AT(from + (STAGES - 1) * STAGE_KEYS);
    new_pairs pairs;
    if (split == 0) find_rows(&pairs, state, block == 0, lid);
    COPY_WAIT(STAGES - 1);
    wait_until(done, count);

    __local uint2(*queries)[WARP] = (__local uint2(*)[WARP])(memory + (2 * STAGES * STAGE_BYTES + NEW_TILES * 2 * TILE_BYTES) / 16);
    __local uint2(*q)[WARP] = queries + lid / WARP * STEPS;  // the warp's fragments
    {
        const int row = min(first + g, n_rows - 1), token = row / GROUP_SIZE;
        float2 x[STEPS][2];
        ask_query(x, qkv + token * ROW_VALUES + (head * GROUP_SIZE + row % GROUP_SIZE) * HEAD_DIM, lane);
        if (split == 0) ask_new(&pairs, qkv + (N_Q_HEADS + head) * HEAD_DIM, n_rows / GROUP_SIZE, lid);
        put_query(q, x, turns + token * HEAD_DIM, lane);
        warp_sync();
    }
    row_states s;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        s.m[i] = -INFINITY;
        s.l[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i) s.acc[i] = 0.0f;
    const int2 tokens = (int2)(min(first + 2 * t, n_rows - 1) / GROUP_SIZE, min(first + 2 * t + 1, n_rows - 1) / GROUP_SIZE);
    if (split == 0) {
        __local uchar* new_tiles = (__local uchar*)memory + 2 * STAGES * STAGE_BYTES;
        uint2 words[NEW_EACH];
        put_new(words, new_tiles, &pairs, turns, n_rows / GROUP_SIZE, lid);
        barrier(CLK_LOCAL_MEM_FENCE);
        append_new(k_cache + head_at, v_cache + head_at, words, &pairs, lid);
        if (first < n_rows) {
            const int last = min(first + ROWS, n_rows) - 1;
#pragma unroll 1
            for (int tile = 0; tile * KEY_TILE <= last / GROUP_SIZE; ++tile) {
                const uint at = local_address(new_tiles) + tile * 2 * TILE_BYTES;
                attend_tile(&s, q, at, at + TILE_BYTES, tokens + 1 - tile * KEY_TILE, lane);
            }
        }
    }
    int stage = 0;
#pragma unroll 1
    for (int key = from; key < end; key += STAGE_KEYS, stage = (stage + 1) % STAGES) {
        COPY_WAIT(STAGES - 2);
        barrier(CLK_LOCAL_MEM_FENCE);  // also: all warps have finished the previous stage, whose place is free
        const int ahead = key + (STAGES - 1) * STAGE_KEYS;
        copy_stage(stages + (stage + STAGES - 1) % STAGES * 2 * STAGE_BYTES, k_head, v_head, page, ahead, end, lid);
        page = PAGE_AT(ahead + STAGE_KEYS);  // requested a stage before the address is needed
        if (first >= n_rows) continue;
        const uint keys = stages + stage * 2 * STAGE_BYTES;
#pragma unroll 1
        for (int i = 0; i < STAGE_KEYS && key + i < end; i += KEY_TILE)
            attend_tile(&s, q, keys + i * HEAD_DIM * 2, keys + STAGE_BYTES + i * HEAD_DIM * 2, (int2)(end - key - i), lane);
    }
    barrier(CLK_LOCAL_MEM_FENCE);

    float norms[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        for (int other = 4; other < WARP; other *= 2) s.l[i] += shuffle_xor(s.l[i], other);
        const int row = first + 2 * t + i, token = i == 0 ? tokens.x : tokens.y, q_head = head * GROUP_SIZE + row % GROUP_SIZE;
        norms[i] = OUTPUT_NORM(s.m[i], s.l[i], q_head);
        if (row >= n_rows || (PACKED_OUT && n_splits == 1)) continue;
        const size_t part = ((size_t)token * N_Q_HEADS + q_head) * N_SPLITS + split;
        if (n_splits > 1 && g == 0) vstore2((float2)(s.m[i], s.l[i]), part, part_ml);
#pragma unroll
        for (int j = 0; j < 2 * STEPS; ++j) {
            const float4 sums = s.acc[j / 2];
            const float sum = j % 2 == 0 ? (i == 0 ? sums.x : sums.y) : (i == 0 ? sums.z : sums.w);
            if (n_splits > 1) {
                part_acc[part * HEAD_DIM + j * 8 + g] = sum;
            } else {
                store_attended(out, token, q_head * HEAD_DIM + j * 8 + g, sum * norms[i]);
            }
        }
    }
#if PACKED_OUT
    if (n_splits == 1 && first < n_rows) store_rows(out, s.acc, (float2)(norms[0], norms[1]), head, first, n_rows, lane);
#endif
    if (n_splits == 1) return;
    __local int* arrived = (__local int*)memory;
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (lid == 0) {  // the fences cover everything that the barriers order
        arrivals += block * N_KV_HEADS + head;
        device_fence();
        *arrived = atomic_inc(arrivals);
        if (*arrived == n_splits - 1) *arrivals = 0;
        device_fence();
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (*arrived != n_splits - 1) return;
    __local float* weights = (__local float*)(memory + 1) + lid / WARP * ROWS * N_SPLITS;  // for the warp's rows [ROWS][N_SPLITS]
    const int split_of_lane = lane % N_SPLITS;
#pragma unroll
    for (int i = 0; i < ROWS * N_SPLITS / WARP; ++i) {
        const int r = (lane + i * WARP) / N_SPLITS, row = min(first + r, n_rows - 1);
        const int q_head = head * GROUP_SIZE + row % GROUP_SIZE, part = (row / GROUP_SIZE * N_Q_HEADS + q_head) * N_SPLITS;
        const float2 state = load_shared_float2(part_ml + (part + min(split_of_lane, n_splits - 1)) * 2);
        float top = state.x;
        for (int other = 1; other < N_SPLITS; other *= 2) top = fmax(top, shuffle_xor(top, other));
        const float weight = split_of_lane < n_splits ? quick_weight(state.x, top) : 0.0f;
        float whole = weight * state.y;
        for (int other = 1; other < N_SPLITS; other *= 2) whole += shuffle_xor(whole, other);
        weights[r * N_SPLITS + split_of_lane] = weight * OUTPUT_NORM(top, whole, q_head);
    }
    warp_sync();
#pragma unroll 1
    for (int r = 0; r < min(ROWS, n_rows - first); ++r) {
        const int row = first + r, token = row / GROUP_SIZE, q_head = head * GROUP_SIZE + row % GROUP_SIZE;
        __global const float* states = part_acc + ((size_t)token * N_Q_HEADS + q_head) * N_SPLITS * HEAD_DIM + 2 * lane;
        float2 sum[HEAD_DIM / 64];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 64; ++i) sum[i] = 0.0f;
#pragma unroll 1
        for (int at = 0; at < n_splits; at += MERGED) {
            float2 of[MERGED][HEAD_DIM / 64];
#pragma unroll
            for (int k = 0; k < MERGED; ++k) {
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 64; ++i)
                    of[k][i] = load_shared_float2(states + min(at + k, n_splits - 1) * HEAD_DIM + i * 64);
            }
#pragma unroll
            for (int k = 0; k < MERGED; ++k) {
                const float weight = weights[r * N_SPLITS + at + k];
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 64; ++i) sum[i] += weight * of[k][i];
            }
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 64; ++i) {
            store_attended(out, token, q_head * HEAD_DIM + i * 64 + 2 * lane, sum[i].x);
            store_attended(out, token, q_head * HEAD_DIM + i * 64 + 2 * lane + 1, sum[i].y);
        }
    }
}

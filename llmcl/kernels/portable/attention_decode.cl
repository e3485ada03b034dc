// Decode attention on any device: rotates the new token's queries and key, appends key and value, attends to the cache.
// Formula, arguments and key splits as in cpu/attention_decode.cl, with one difference: up to ONE_SPLIT_KEYS keys the first split takes
// all keys and writes `out`. Beyond, each split stores its state in part_ml and part_acc for attention_merge.
//
// Index space: groups (N_KV_HEADS, N_SPLITS, step rows: step_rows.cl), local size LOCAL_SIZE. BLOCK_N keys at a time, for all
// GROUP_SIZE query heads:
//
//   scores  a work-item has four neighbouring keys and every SLICES-th dimension (with q8_0: a piece with four dimensions)
//           work-item:  quad = i % 4 | slice = i / 4 % SLICES | 16 keys = i / (4 SLICES)     neighbours read neighbouring bytes
//           local memory sums the slices; a work-item then has one key for every HEADS_AT_ONCE-th head
//   values  a work-item has four neighbouring columns and every ROWS_AT_ONCE-th key; the key sums are added at the end
//
// The values are requested together with the keys, before any wait. Three barriers per block: slice sums, scores, weights.
//
// part_ml, part_acc  as in attention_merge.cl (unused with one split)      out  float [N_Q_HEADS][HEAD_DIM]
// sinks              see online_softmax.cl; added by a single split
// Build: KV, HEAD_DIM, N_Q_HEADS, N_KV_HEADS, GROUP_SIZE, CAPACITY (a multiple of BLOCK_N), N_SPLITS, ONE_SPLIT_KEYS, SCALE,
// BLOCK_N (16, 32 or 64), LOCAL_SIZE (a power of two >= BLOCK_N and HEAD_DIM / 4). For pages see kv_address.cl.
// Local memory: 4 GROUP_SIZE (4 LOCAL_SIZE + HEAD_DIM + 2 BLOCK_N + 1) bytes.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(GROUP_SIZE) || \
    !defined(CAPACITY) || !defined(N_SPLITS) || !defined(ONE_SPLIT_KEYS) || !defined(SCALE) || !defined(BLOCK_N) || \
    !defined(LOCAL_SIZE) || !defined(STATE_POSITION)
#error "portable/attention_decode.cl needs the build constants KV, HEAD_DIM, N_Q_HEADS, N_KV_HEADS, GROUP_SIZE, CAPACITY, N_SPLITS, ONE_SPLIT_KEYS, SCALE, BLOCK_N, LOCAL_SIZE and those of the step state"
#endif
#include "common/append_token.cl"
#include "common/online_softmax.cl"
#include "common/attention_mods.cl"
#include "common/step_rows.cl"
#include "portable/widen.cl"

#define SLICES (LOCAL_SIZE / (BLOCK_N / 4))
#define HEADS_AT_ONCE (LOCAL_SIZE / BLOCK_N)
#define OWN_HEADS ((GROUP_SIZE + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE)
#define ROW_ITEMS (HEAD_DIM / 4)
#define ROWS_AT_ONCE (LOCAL_SIZE / ROW_ITEMS)
#define OWN_ROWS ((BLOCK_N + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE)
#if KV_QUANTIZED
#define PIECE_DIMS 4
#else
#define PIECE_DIMS 1
#endif
#define PIECES (HEAD_DIM / PIECE_DIMS)
#define OWN_PIECES ((PIECES + SLICES - 1) / SLICES)
#define HAS_PIECE(p) (PIECES % SLICES == 0 || (p) < PIECES)
#define EACH_HEAD(g) _Pragma("unroll") for (int g = 0; g < GROUP_SIZE; ++g)
#define EACH_OWN_HEAD(h) _Pragma("unroll") for (int h = 0; h < OWN_HEADS; ++h)
#if BLOCK_N <= 32 && HEAD_DIM > 128  // for devices with few registers: an unrolled loop would fill them
#define FEW_AT_ONCE _Pragma("unroll 4")
#else
#define FEW_AT_ONCE
#endif
#define HAS_ROWS (LOCAL_SIZE % ROW_ITEMS == 0 || lid < ROWS_AT_ONCE * ROW_ITEMS)

// Four keys in a dimension piece. key: the first, a multiple of 4, counted from the tile `k`.
#if KV_QUANTIZED
typedef struct {
    uint4 numbers;  // a key per word
    uint2 scales;
} key_piece;
inline key_piece load_keys(__global const kv_t* k, const int key, const int piece) {
    __global const kv_t* group = k + (key / 16 * KV_GROUPS + piece / 8) * KV_GROUP_SIZE;
    const key_piece found = {*(__global const uint4*)(group + 32 + piece % 8 * 64 + key % 16 * 4),
                             *(__global const uint2*)(group + key % 16 * 2)};
    return found;
}
// One dimension at a time, to keep few values in registers.
#define ADD_SCORES(s, keys, q, piece)                                                                         \
    {                                                                                                         \
        const uchar4 a = as_uchar4(keys.numbers.x), b = as_uchar4(keys.numbers.y), c = as_uchar4(keys.numbers.z), \
                     d = as_uchar4(keys.numbers.w);                                                           \
        const float4 scales = (float4)(widen_f16(keys.scales.x), widen_f16(keys.scales.y));                   \
        ADD_DIMENSION(s, q, (piece) * 4, (uchar4)(a.x, b.x, c.x, d.x))                                        \
        ADD_DIMENSION(s, q, (piece) * 4 + 1, (uchar4)(a.y, b.y, c.y, d.y))                                    \
        ADD_DIMENSION(s, q, (piece) * 4 + 2, (uchar4)(a.z, b.z, c.z, d.z))                                    \
        ADD_DIMENSION(s, q, (piece) * 4 + 3, (uchar4)(a.w, b.w, c.w, d.w))                                    \
    }
#define ADD_DIMENSION(s, q, dimension, bytes)                             \
    {                                                                     \
        const float4 four = (convert_float4(bytes) - 128.0f) * scales;    \
        EACH_HEAD(g) s[g] += four * q[(dimension) * GROUP_SIZE + g];      \
    }
#else
typedef CAT(stored4_, KV) key_piece;
inline key_piece load_keys(__global const kv_t* k, const int key, const int piece) {
    return *(__global const key_piece*)(k + (key / 16 * HEAD_DIM + piece) * 16 + key % 16);
}
#define ADD_SCORES(s, keys, q, piece)                                                                    \
    {                                                                                                    \
        const float4 four = CAT(widen4_, KV)(keys);                                                      \
        EACH_HEAD(g) s[g] += four * q[(piece) * GROUP_SIZE + g];                                         \
    }
#endif

// Columns c .. c+3 of value `row`, counted from the tile `v`.
#if KV_QUANTIZED
typedef struct {
    uint numbers;
    float scale;
} value_piece;
inline value_piece load_values(__global const kv_t* v, const int row, const int c) {
    __global const kv_t* tile = v + row / 16 * KV_TILE;
    const value_piece found = {*(__global const uint*)(tile + 32 * KV_GROUPS + row % 16 * HEAD_DIM + c),
                               kv_scale(tile, c / 32 * 16 + row % 16)};
    return found;
}
inline float4 four_values(const value_piece found) { return convert_float4(as_char4(found.numbers)) * found.scale; }
#else
typedef CAT(stored4_, KV) value_piece;
inline value_piece load_values(__global const kv_t* v, const int row, const int c) {
    return *(__global const value_piece*)(v + row * HEAD_DIM + c);
}
inline float4 four_values(const value_piece found) { return CAT(widen4_, KV)(found); }
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void attention_decode(__global const float* qkv, __global const float* rope, __global const int* state,
                      __global kv_t* k_cache, __global kv_t* v_cache, __global float* part_ml,
                      __global float* part_acc, __global float* out SINKS_PARAM MOD_PARAMS) {
    __local float q[HEAD_DIM * GROUP_SIZE] __attribute__((aligned(16)));            // [dimension][head]
    __local float sums[4 * LOCAL_SIZE * GROUP_SIZE] __attribute__((aligned(16)));   // [slice][head][key], later [row][head][column]
    __local float scores[GROUP_SIZE * BLOCK_N] __attribute__((aligned(16)));        // [head][key], later the weight sums
    __local float weights[BLOCK_N * GROUP_SIZE] __attribute__((aligned(16)));       // [key][head]
    __local float shrinks[GROUP_SIZE] __attribute__((aligned(16)));
    const int lid = get_local_id(0), head = get_group_id(0), split = get_group_id(1);
    const int row = step_row(2);
    state = sequence_state(state, row);
    qkv += row * QKV_HEADS * HEAD_DIM;
    rope += row * HEAD_DIM;
    out += row * N_Q_HEADS * HEAD_DIM;
    part_ml += row * N_Q_HEADS * N_SPLITS * 2;
    part_acc += (size_t)row * N_Q_HEADS * N_SPLITS * HEAD_DIM;
    const int position = state[STATE_POSITION], kv_len = position + 1;
    const int n_splits = kv_len > ONE_SPLIT_KEYS ? N_SPLITS : 1;
    if (split >= n_splits) return;
    // The splits share the keys after the prefix hidden by mask_mod.
    const int2 query = (int2)(position);
    const int sequence = MOD_SEQUENCE(state);
    const int visible_from = first_visible(sequence, head * GROUP_SIZE, GROUP_SIZE, query, kv_len, BLOCK_N MOD_ARGS);
    const int per_split = (kv_len - visible_from + n_splits * BLOCK_N - 1) / (n_splits * BLOCK_N) * BLOCK_N;
    const int first = visible_from + split * per_split, end = min(kv_len, first + per_split);

#if !SHARED_KV
    if (first <= position && position < end)
        append_token(state, qkv, rope, k_cache, v_cache, kv_row(state, position), head, 1, lid, LOCAL_SIZE);
#endif
    k_cache += head * KV_HEAD_SIZE;
    v_cache += head * KV_HEAD_SIZE;
    if (first < end)
        for (int i = lid; i < GROUP_SIZE * HEAD_DIM; i += LOCAL_SIZE)
            q[i % HEAD_DIM * GROUP_SIZE + i / HEAD_DIM] =
                rope_element(qkv + (head * GROUP_SIZE + i / HEAD_DIM) * HEAD_DIM, rope, i % HEAD_DIM) * SCALE;
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);

    const int quad = lid / (4 * SLICES) * 16 + lid % 4 * 4, slice = lid / 4 % SLICES;
    const int own_key = lid % BLOCK_N, own_head = lid / BLOCK_N;
    const int column = lid % ROW_ITEMS * 4, own_row = lid / ROW_ITEMS;
    float m[OWN_HEADS], l[OWN_HEADS];  // l: over the work-item's own key in each block
    float4 acc[GROUP_SIZE];
    EACH_OWN_HEAD(h) {
        m[h] = -INFINITY;
        l[h] = 0.0f;
    }
    EACH_HEAD(g) acc[g] = 0.0f;
    for (int j = first; j < end; j += BLOCK_N) {
        const int n_keys = min(BLOCK_N, end - j);
        const int seen = tile_class(sequence, head * GROUP_SIZE, GROUP_SIZE, query, j, j + n_keys MOD_ARGS);
        if (seen == TILE_EMPTY) continue;
        const int key_row = kv_row(state, j);
        __global const kv_t* k = KV_TILES_AT(k_cache, key_row);
        __global const kv_t* v = KV_TILES_AT(v_cache, key_row);

        // Keys past the end are read, then discarded. Values past the end are not read: 0 times NaN is NaN.
        key_piece keys[OWN_PIECES];
#pragma unroll
        for (int i = 0; i < OWN_PIECES; ++i)
            if (HAS_PIECE(slice + i * SLICES)) keys[i] = load_keys(k, quad, slice + i * SLICES);
        value_piece values[OWN_ROWS];
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) {
            const int at = own_row + i * ROWS_AT_ONCE;
            values[i] = load_values(v, min(at, n_keys - 1), column);
        }
        float4 s[GROUP_SIZE];
        EACH_HEAD(g) s[g] = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN_PIECES; ++i)
            if (HAS_PIECE(slice + i * SLICES)) ADD_SCORES(s, keys[i], q, slice + i * SLICES)
        EACH_HEAD(g)
            *(__local float4*)(sums + (slice * GROUP_SIZE + g) * BLOCK_N + quad) = s[g];
        barrier(CLK_LOCAL_MEM_FENCE);

        float own_scores[OWN_HEADS];
        EACH_OWN_HEAD(h) {
            const int g = own_head + h * HEADS_AT_ONCE;
            if (g >= GROUP_SIZE) continue;
            float score = 0.0f;
            FEW_AT_ONCE
            for (int i = 0; i < SLICES; ++i) score += sums[(i * GROUP_SIZE + g) * BLOCK_N + own_key];
#if HAS_SCORE_MOD
            score = score_mod(score, sequence, head * GROUP_SIZE + g, position, j + min(own_key, n_keys - 1) MOD_ARGS);
#endif
            bool is_seen = own_key < n_keys;
#if HAS_MASK_MOD
            if (is_seen && seen == TILE_PARTIAL) is_seen = mask_mod(sequence, head * GROUP_SIZE + g, position, j + own_key MOD_ARGS);
#endif
            own_scores[h] = is_seen ? score : -INFINITY;
            scores[g * BLOCK_N + own_key] = own_scores[h];
        }
        barrier(CLK_LOCAL_MEM_FENCE);

        EACH_OWN_HEAD(h) {
            const int g = own_head + h * HEADS_AT_ONCE;
            if (g >= GROUP_SIZE) continue;
            // Every work-item in a head finds the maximum: cheaper than the barriers in a reduction.
            float4 tops = (float4)(m[h]);
            for (int i = 0; i < BLOCK_N; i += 4) tops = fmax(tops, *(__local const float4*)(scores + g * BLOCK_N + i));
            const float top = fmax(fmax(tops.x, tops.y), fmax(tops.z, tops.w));
            const float weight = softmax_weight(own_scores[h], top), shrink = softmax_weight(m[h], top);
            weights[own_key * GROUP_SIZE + g] = weight;
            if (own_key == 0) shrinks[g] = shrink;
            l[h] = l[h] * shrink + weight;
            m[h] = top;
        }
        barrier(CLK_LOCAL_MEM_FENCE);

        EACH_HEAD(g) acc[g] *= shrinks[g];
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) {
            const int at = own_row + i * ROWS_AT_ONCE;
            if (at >= n_keys) continue;
            const float4 four = four_values(values[i]);
            EACH_HEAD(g) acc[g] += weights[at * GROUP_SIZE + g] * four;
        }
    }

    // The sums over the keys: [row % ROWS_AT_ONCE][head][column].
    barrier(CLK_LOCAL_MEM_FENCE);
    if (HAS_ROWS)
        EACH_HEAD(g)
            *(__local float4*)(sums + (own_row * GROUP_SIZE + g) * HEAD_DIM + column) = acc[g];
#if HAS_SINKS
    __local float* tops = shrinks;  // no longer read
#endif
    EACH_OWN_HEAD(h) {
        const int g = own_head + h * HEADS_AT_ONCE;
        if (g >= GROUP_SIZE) continue;
        scores[g * BLOCK_N + own_key] = l[h];
#if HAS_SINKS
        if (own_key == 0) tops[g] = m[h];
#endif
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const bool is_whole = n_splits == 1;
    for (int i = lid; i < GROUP_SIZE * HEAD_DIM; i += LOCAL_SIZE) {
        const int g = i / HEAD_DIM;
        float sum = 0.0f;
        float4 norms = 0.0f;
        for (int r = 0; r < ROWS_AT_ONCE; ++r) sum += sums[r * GROUP_SIZE * HEAD_DIM + i];
        for (int key = 0; key < BLOCK_N; key += 4) norms += *(__local const float4*)(scores + g * BLOCK_N + key);
        const float norm = norms.x + norms.y + norms.z + norms.w;
        const int to = (head * GROUP_SIZE + g) * HEAD_DIM + i % HEAD_DIM;
        if (is_whole) out[to] = sum * OUTPUT_NORM(tops[g], norm, head * GROUP_SIZE + g);
        else if (norm > 0.0f) part_acc[((size_t)(head * GROUP_SIZE + g) * N_SPLITS + split) * HEAD_DIM + i % HEAD_DIM] = sum;
        if (!is_whole && i % HEAD_DIM == 0) part_ml[2 * ((head * GROUP_SIZE + g) * N_SPLITS + split) + 1] = norm;
    }
    EACH_OWN_HEAD(h) {
        const int g = own_head + h * HEADS_AT_ONCE;
        if (!is_whole && g < GROUP_SIZE && own_key == 0) part_ml[2 * ((head * GROUP_SIZE + g) * N_SPLITS + split)] = m[h];
    }
}

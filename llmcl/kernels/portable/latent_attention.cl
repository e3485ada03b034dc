// Latent attention on any device: a token's query heads attend to shared rows.
// Formula and arguments as in cpu/latent_attention.cl.
//
// Index space: groups (N_SPLITS, N_Q_HEADS / HEADS, n), local size LOCAL_SIZE: a key split, heads, a token. KEYS rows at a time:
//
//   scores  a work-item has one row and every SLICES-th four-column piece; neighbours have neighbouring columns. Local memory sums the
//           slices; a work-item then has one or more (head, row) pairs
//   values  a work-item has every LOCAL_SIZE-th four-column piece, for all heads and rows
//
// Build: as cpu/latent_attention.cl, without HEAD_ROWS and COLUMNS; LOCAL_SIZE (a power of two, at least KEYS).
// Local memory: 4 HEADS (HEAD_DIM + LOCAL_SIZE + 2 KEYS + 1) bytes.
#if !defined(N_Q_HEADS) || !defined(QUERY) || !defined(ROPE) || !defined(N_SPLITS) || !defined(SCALE) || !defined(HEADS) || \
    !defined(LOCAL_SIZE) || !defined(CAPACITY) || !defined(STATE_POSITION)
#error "portable/latent_attention.cl needs N_Q_HEADS, QUERY, ROPE, N_SPLITS, SCALE, HEADS, LOCAL_SIZE, CAPACITY and the constants of the step state"
#endif
#include "common/latent_row.cl"
#include "common/online_softmax.cl"
#include "common/attention_mods.cl"
#include "common/step_rows.cl"
#include "portable/widen.cl"

// Columns c .. c+3 in row i of the tile; c is a multiple of 4.
#if KV_QUANTIZED
#define LATENT4(tiles, i, c) \
    (convert_float4(*(__global const char4*)LATENT_NUMBERS(tiles, i, c)) * LATENT_SCALE(tiles, i, c))
#else
#define LATENT4(tiles, i, c) CAT(four_, KV)((tiles) + (i) * HEAD_DIM + (c))
#endif

#define KEYS 16
#define SLICES (LOCAL_SIZE / KEYS)
#define PAIRS (HEADS * KEYS)
#define OWN_PAIRS ((PAIRS + LOCAL_SIZE - 1) / LOCAL_SIZE)
#define PIECES (RANK / 4)
#define OWN_PIECES ((PIECES + LOCAL_SIZE - 1) / LOCAL_SIZE)
#define HAS_PIECE(i) (PIECES % LOCAL_SIZE == 0 || lid + (i) * LOCAL_SIZE < PIECES)

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void latent_attention(__global const float* absorbed, __global const float* queries, __global const int* state,
                      __global const kv_t* cache, __global float* part_ml, __global float* part_acc,
                      __global float* out MOD_PARAMS) {
    __local float q[HEADS * HEAD_DIM] __attribute__((aligned(16)));
    __local float sums[PAIRS * SLICES];
    __local float scores[PAIRS], weights[PAIRS], shrinks[HEADS];
    const int lid = get_local_id(0), split = get_group_id(0), head = get_group_id(1) * HEADS, t = get_group_id(2);
    const int position = row_position(state, t), kv_len = position + 1;
    state = sequence_state(state, t);
    const size_t first_row = (size_t)t * N_Q_HEADS + head;
    absorbed += first_row * RANK;
    queries += first_row * QUERY + QUERY - ROPE - RANK;  // column c in a row aligns with number c
    const int2 query = (int2)(position);
    const int sequence = MOD_SEQUENCE(state);
    const int visible_from = first_visible(sequence, head, HEADS, query, kv_len, KEYS MOD_ARGS);
    const int per_split = (kv_len - visible_from + N_SPLITS * KEYS - 1) / (N_SPLITS * KEYS) * KEYS;
    const int first = visible_from + split * per_split, end = min(kv_len, first + per_split);

    for (int i = lid; i < HEADS * HEAD_DIM; i += LOCAL_SIZE) {
        const int h = i / HEAD_DIM, c = i % HEAD_DIM;
        q[i] = SCALE * (c < RANK ? absorbed[h * RANK + c] : queries[h * QUERY + c]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);

    const int own_row = lid / SLICES, slice = lid % SLICES;
    float m[OWN_PAIRS], l[HEADS];
    float4 acc[HEADS][OWN_PIECES];
    for (int o = 0; o < OWN_PAIRS; ++o) m[o] = -INFINITY;
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        l[h] = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN_PIECES; ++i) acc[h][i] = 0.0f;
    }
    for (int j = first; j < end; j += KEYS) {
        const int n_keys = min(KEYS, end - j);
        const int seen = tile_class(sequence, head, HEADS, query, j, j + n_keys MOD_ARGS);
        if (seen == TILE_EMPTY) continue;
        const int row = kv_row(state, j);
        __global const kv_t* tiles = KV_TILES_AT(cache, row);

        float s[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; ++h) s[h] = 0.0f;
        for (int c = 4 * slice; c < HEAD_DIM; c += 4 * SLICES) {
            const float4 k = LATENT4(tiles, min(own_row, n_keys - 1), c);
#pragma unroll
            for (int h = 0; h < HEADS; ++h) s[h] += dot(k, *(__local const float4*)(q + h * HEAD_DIM + c));
        }
#pragma unroll
        for (int h = 0; h < HEADS; ++h) sums[(h * KEYS + own_row) * SLICES + slice] = s[h];
        barrier(CLK_LOCAL_MEM_FENCE);

        float own[OWN_PAIRS];
        for (int o = 0; o < OWN_PAIRS; ++o) {
            const int pair = lid + o * LOCAL_SIZE, h = pair / KEYS, k = pair % KEYS;
            if (pair >= PAIRS) continue;
            float score = 0.0f;
            for (int i = 0; i < SLICES; ++i) score += sums[pair * SLICES + i];
#if HAS_SCORE_MOD
            score = score_mod(score, sequence, head + h, position, j + min(k, n_keys - 1) MOD_ARGS);
#endif
            bool is_seen = k < n_keys;
#if HAS_MASK_MOD
            if (is_seen && seen == TILE_PARTIAL) is_seen = mask_mod(sequence, head + h, position, j + k MOD_ARGS);
#endif
            own[o] = is_seen ? score : -INFINITY;
            scores[pair] = own[o];
        }
        barrier(CLK_LOCAL_MEM_FENCE);

        for (int o = 0; o < OWN_PAIRS; ++o) {
            const int pair = lid + o * LOCAL_SIZE, h = pair / KEYS;
            if (pair >= PAIRS) continue;
            float top = m[o];
            for (int k = 0; k < KEYS; ++k) top = fmax(top, scores[h * KEYS + k]);
            weights[pair] = softmax_weight(own[o], top);
            if (pair % KEYS == 0) shrinks[h] = softmax_weight(m[o], top);
            m[o] = top;
        }
        barrier(CLK_LOCAL_MEM_FENCE);

#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            l[h] *= shrinks[h];
#pragma unroll
            for (int i = 0; i < OWN_PIECES; ++i) acc[h][i] *= shrinks[h];
        }
        for (int k = 0; k < n_keys; ++k) {
            float4 latent[OWN_PIECES];
#pragma unroll
            for (int i = 0; i < OWN_PIECES; ++i)
                latent[i] = HAS_PIECE(i) ? LATENT4(tiles, k, 4 * (lid + i * LOCAL_SIZE)) : (float4)(0.0f);
#pragma unroll
            for (int h = 0; h < HEADS; ++h) {
                const float weight = weights[h * KEYS + k];
                l[h] += weight;
#pragma unroll
                for (int i = 0; i < OWN_PIECES; ++i) acc[h][i] += weight * latent[i];
            }
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        const size_t part = (first_row + h) * N_SPLITS + split;
#if N_SPLITS > 1
        __global float* to = part_acc + part * RANK;
        const float norm = 1.0f;
        if (lid == 0) part_ml[2 * part + 1] = l[h];
#else
        __global float* to = out + part * RANK;
        const float norm = softmax_norm(l[h]);
#endif
#pragma unroll
        for (int i = 0; i < OWN_PIECES; ++i)
            if (HAS_PIECE(i)) *(__global float4*)(to + 4 * (lid + i * LOCAL_SIZE)) = acc[h][i] * norm;
    }
#if N_SPLITS > 1
    for (int o = 0; o < OWN_PAIRS; ++o) {
        const int pair = lid + o * LOCAL_SIZE;
        if (pair < PAIRS && pair % KEYS == 0) part_ml[2 * ((first_row + pair / KEYS) * N_SPLITS + split)] = m[o];
    }
#endif
}

// Latent attention on a CPU: a token's query heads attend to shared rows (latent_row.cl).
//
//   out[t][h] = softmax_j(SCALE (absorbed[t][h] . latent[j] + queries[t][h][QUERY - ROPE:] . key[j])) latent[j],  j = 0 .. position of t
//   (DeepSeek-AI, "DeepSeek-V2", 2024, 2.1.2: a head's queries are projected into the latent space before, its values after)
//
// absorbed   float [n][N_Q_HEADS][RANK]      queries  float [n][N_Q_HEADS][QUERY], used: the last ROPE, rotated
// cache      KV, see latent_row.cl           state    see STATE_* and, for several sequences, step_rows.cl
// part_ml, part_acc   partial states [n][N_Q_HEADS][N_SPLITS] for `attention_merge`: (m, l) and float [RANK]
// out        float [n][N_Q_HEADS][RANK]      with N_SPLITS = 1; part_ml and part_acc are then unused
//
// Index space: groups (N_SPLITS, N_Q_HEADS / HEADS, n), local size 1: a key split, heads, a token. Each key is thus read once per
// HEADS query heads, in decode and in prefill. KEYS rows are widened at a time and stay in the first-level cache for
// HEAD_ROWS heads after HEAD_ROWS heads; column sums stay vectors until the end.
// Build: constants for latent_row.cl, CAPACITY, N_Q_HEADS, QUERY, ROPE (multiples of 16), N_SPLITS, SCALE, HEADS (divides N_Q_HEADS),
// HEAD_ROWS
// (divides HEADS), COLUMNS (divides RANK / 16). Mods: attention_mods.cl.
#if !defined(N_Q_HEADS) || !defined(QUERY) || !defined(ROPE) || !defined(N_SPLITS) || !defined(SCALE) || !defined(HEADS) || \
    !defined(HEAD_ROWS) || !defined(COLUMNS) || !defined(CAPACITY) || !defined(STATE_POSITION)
#error "cpu/latent_attention.cl needs N_Q_HEADS, QUERY, ROPE, N_SPLITS, SCALE, HEADS, HEAD_ROWS, COLUMNS, CAPACITY and the constants of the step state"
#endif
#include "common/latent_row.cl"
#include "common/online_softmax.cl"
#include "common/attention_mods.cl"
#include "common/step_rows.cl"

#define KEYS 8      // divides a tile's 16 rows
#define KEY_ROWS 4  // divides KEYS: keys with sums in registers
#define CHUNKS (HEAD_DIM / 16)
#define LATENT_CHUNKS (RANK / 16)

// scores[h], lane k: the product of head h and row k, for KEY_ROWS rows from k0 on.
IN_REGISTERS inline void add_key_scores(float16* scores, const float16 (*rows)[CHUNKS], const int k0,
                                        __global const float* absorbed, __global const float* queries) {
    float16 sums[HEAD_ROWS][KEY_ROWS];
#pragma unroll
    for (int h = 0; h < HEAD_ROWS; ++h)
#pragma unroll
        for (int k = 0; k < KEY_ROWS; ++k) sums[h][k] = 0;
    for (int c = 0; c < LATENT_CHUNKS; ++c)
#pragma unroll
        for (int h = 0; h < HEAD_ROWS; ++h) {
            const float16 q = load16_f32(absorbed + h * RANK + c * 16);
#pragma unroll
            for (int k = 0; k < KEY_ROWS; ++k) sums[h][k] += q * rows[k0 + k][c];
        }
    for (int c = LATENT_CHUNKS; c < CHUNKS; ++c)
#pragma unroll
        for (int h = 0; h < HEAD_ROWS; ++h) {
            const float16 q = load16_f32(queries + h * QUERY + c * 16);
#pragma unroll
            for (int k = 0; k < KEY_ROWS; ++k) sums[h][k] += q * rows[k0 + k][c];
        }
#pragma unroll
    for (int h = 0; h < HEAD_ROWS; ++h)
#pragma unroll
        for (int k = 0; k < KEY_ROWS; ++k) ((float*)&scores[h])[k0 + k] = sum16(sums[h][k]) * SCALE;
}

// acc[h] = acc[h] shrinks[h] + the rows, weighted: HEAD_ROWS heads, `stride` numbers apart.
IN_REGISTERS inline void add_latents(__global float* acc, const int stride, const float16 (*rows)[CHUNKS], const float16* weights,
                                     const float* shrinks) {
    for (int c = 0; c < LATENT_CHUNKS; c += COLUMNS) {
        float16 sums[HEAD_ROWS][COLUMNS];
#pragma unroll
        for (int h = 0; h < HEAD_ROWS; ++h)
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) sums[h][i] = load16_f32(acc + h * stride + (c + i) * 16) * shrinks[h];
        for (int k = 0; k < KEYS; ++k)
#pragma unroll
            for (int h = 0; h < HEAD_ROWS; ++h) {
                const float weight = ((const float*)&weights[h])[k];
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i) sums[h][i] += weight * rows[k][c + i];
            }
#pragma unroll
        for (int h = 0; h < HEAD_ROWS; ++h)
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) store16_f32(sums[h][i], acc + h * stride + (c + i) * 16);
    }
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void latent_attention(__global const float* absorbed, __global const float* queries, __global const int* state,
                      __global const kv_t* cache, __global float* part_ml, __global float* part_acc,
                      __global float* out MOD_PARAMS) {
    const int split = get_group_id(0), head = get_group_id(1) * HEADS, t = get_group_id(2);
    const int position = row_position(state, t), kv_len = position + 1;
    state = sequence_state(state, t);
    const size_t first_row = (size_t)t * N_Q_HEADS + head;
    absorbed += first_row * RANK;
    queries += first_row * QUERY + QUERY - ROPE - RANK;  // column c in a row aligns with number c
#if N_SPLITS > 1
    __global float* acc = part_acc + (first_row * N_SPLITS + split) * RANK;
    const int stride = N_SPLITS * RANK;
#else
    __global float* acc = out + first_row * RANK;
    const int stride = RANK;
#endif
    const int2 query = (int2)(position);
    const int sequence = MOD_SEQUENCE(state);
    const int visible_from = first_visible(sequence, head, HEADS, query, kv_len, KEYS MOD_ARGS);
    const int per_split = (kv_len - visible_from + N_SPLITS * KEYS - 1) / (N_SPLITS * KEYS) * KEYS;
    const int first = visible_from + split * per_split, end = min(kv_len, first + per_split);
    const float16 lane = (float16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);

    float m[HEADS], l[HEADS];
    for (int h = 0; h < HEADS; ++h) {
        m[h] = -INFINITY;
        l[h] = 0.0f;
        for (int c = 0; c < LATENT_CHUNKS; ++c) store16_f32((float16)(0.0f), acc + h * stride + c * 16);
    }
    for (int j = first; j < end; j += KEYS) {
        const int n_keys = min(KEYS, end - j);
        const int seen = tile_class(sequence, head, HEADS, query, j, j + n_keys MOD_ARGS);
        if (seen == TILE_EMPTY) continue;
        const int row = kv_row(state, j);
        __global const kv_t* tiles = KV_TILES_AT(cache, row);
        float16 rows[KEYS][CHUNKS];
        for (int k = 0; k < n_keys; ++k)
            for (int c = 0; c < CHUNKS; ++c) rows[k][c] = latent16(tiles, row % 16 + k, c * 16);
        for (int k = n_keys; k < KEYS; ++k)
            for (int c = 0; c < CHUNKS; ++c) rows[k][c] = 0;
        for (int h0 = 0; h0 < HEADS; h0 += HEAD_ROWS) {
            float16 weights[HEAD_ROWS];
            float shrinks[HEAD_ROWS];
            for (int h = 0; h < HEAD_ROWS; ++h) weights[h] = 0;
            for (int k0 = 0; k0 < KEYS; k0 += KEY_ROWS)
                add_key_scores(weights, rows, k0, absorbed + h0 * RANK, queries + h0 * QUERY);
            for (int h = 0; h < HEAD_ROWS; ++h) {
                const int own = h0 + h;
#if HAS_SCORE_MOD || HAS_MASK_MOD
                for (int k = 0; k < n_keys; ++k) {
                    float score = ((float*)&weights[h])[k];
#if HAS_SCORE_MOD
                    score = score_mod(score, sequence, head + own, position, j + k MOD_ARGS);
#endif
#if HAS_MASK_MOD
                    if (seen == TILE_PARTIAL && !mask_mod(sequence, head + own, position, j + k MOD_ARGS)) score = -INFINITY;
#endif
                    ((float*)&weights[h])[k] = score;
                }
#endif
                const float16 scores = lane < (float)n_keys ? weights[h] : (float16)(-INFINITY);
                float top = m[own];
                for (int k = 0; k < KEYS; ++k) top = fmax(top, ((const float*)&scores)[k]);
                weights[h] = exp16(scores - (top == -INFINITY ? 0.0f : top));
                shrinks[h] = softmax_weight(m[own], top);
                l[own] = l[own] * shrinks[h] + sum16(weights[h]);
                m[own] = top;
            }
            add_latents(acc + h0 * stride, stride, rows, weights, shrinks);
        }
    }
    for (int h = 0; h < HEADS; ++h) {
#if N_SPLITS > 1
        const size_t part = (first_row + h) * N_SPLITS + split;
        part_ml[2 * part] = m[h];
        part_ml[2 * part + 1] = l[h];
#else
        const float norm = softmax_norm(l[h]);
        for (int c = 0; c < LATENT_CHUNKS; ++c)
            store16_f32(load16_f32(acc + h * stride + c * 16) * norm, acc + h * stride + c * 16);
#endif
    }
}

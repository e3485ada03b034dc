// One step of attention on a CPU: ROWS queries meet BLOCK_N keys, and their online-softmax states take them in.
//
//   S = q K^T;  m' = max(m, rowmax S);  P = exp(S - m');  l = l exp(m - m') + rowsum P;  acc = acc exp(m - m') + P V
//   (Dao et al., "FlashAttention-2", algorithm 1)
//
// The same step serves decode (ROWS query heads that share a KV head) and prefill (ROWS positions of one head).
// Keys lie in tiles [HEAD_DIM][16], so a vector holds the scores of 16 keys and needs no horizontal sum. The output
// is accumulated in slices of DV_TILE columns, whose ROWS * DV_TILE / 16 vectors must fit the register file.
//
// Build: KV, HEAD_DIM, ROWS, BLOCK_N (a multiple of 16), DV_TILE (a multiple of 16 that divides HEAD_DIM).
#if !defined(KV) || !defined(HEAD_DIM) || !defined(ROWS) || !defined(BLOCK_N) || !defined(DV_TILE)
#error "cpu/attention_tile.cl needs the build constants KV, HEAD_DIM, ROWS, BLOCK_N, DV_TILE"
#endif
#include "common.cl"
#include "online_softmax.cl"
#include "attention_mods.cl"

#define KEY_TILES (BLOCK_N / 16)
#define COLUMNS (HEAD_DIM / 16)
#define SLICE (DV_TILE / 16)

typedef struct {
    float q[ROWS * HEAD_DIM];  // already multiplied by the softmax scale
    float m[ROWS], l[ROWS];
    float16 acc[ROWS][COLUMNS];
    int head[ROWS], q_idx[ROWS];  // for the mods
} attention_state;

inline void attention_start(attention_state* state) {
    for (int r = 0; r < ROWS; ++r) {
        state->m[r] = -INFINITY;
        state->l[r] = 0.0f;
        for (int c = 0; c < COLUMNS; ++c) state->acc[r][c] = 0;
    }
}

#if HAS_SCORE_MOD || HAS_MASK_MOD
WIDE_MODS

// Scores of one row and 16 keys through the mods; `last` is the last key that exists, so that lookups stay in bounds.
inline void apply_mods(float16* s, const int b, const int h, const int q_idx, const int key, const int last,
                       const bool masked MOD_PARAMS) {
    const int16 keys = key + (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int16 kv_idx = keys < last ? keys : (int16)(last);
#if HAS_SCORE_MOD
    *s = score_mod16(*s, b, h, q_idx, kv_idx MOD_ARGS);
#endif
#if HAS_MASK_MOD
    if (masked) *s = mask_mod16(b, h, q_idx, kv_idx MOD_ARGS) ? *s : (float16)(-INFINITY);
#endif
}
#endif

// k, v point at the first key of the tile, which is key `first_key` of the text; n_keys of its BLOCK_N keys exist; row r
// sees the first visible[r] of them, and of those only what mask_mod lets it see if the tile is `masked`.
// Keys that do not exist are computed with and discarded, values that do not exist are never read.
inline void attention_tile(attention_state* state, __global const CAT(KV, _t)* k, __global const CAT(KV, _t)* v,
                           const int n_keys, const int* visible, const int batch, const int first_key,
                           const bool masked MOD_PARAMS) {
    const float16 lane = (float16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    float16 s[ROWS][KEY_TILES];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int t = 0; t < KEY_TILES; ++t) s[r][t] = 0;
    for (int d = 0; d < HEAD_DIM; ++d) {
        float16 key[KEY_TILES];
#pragma unroll
        for (int t = 0; t < KEY_TILES; ++t) key[t] = CAT(load16_, KV)(k + ((size_t)t * HEAD_DIM + d) * 16);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int t = 0; t < KEY_TILES; ++t) s[r][t] += key[t] * state->q[r * HEAD_DIM + d];
    }

#if HAS_SCORE_MOD || HAS_MASK_MOD
    for (int r = 0; r < ROWS; ++r) {
        for (int t = 0; t < KEY_TILES; ++t) {
            if (16 * t >= n_keys) break;
            apply_mods(&s[r][t], batch, state->head[r], state->q_idx[r], first_key + 16 * t, first_key + n_keys - 1,
                       masked MOD_ARGS);
        }
    }
#endif
    float16 p[ROWS][KEY_TILES];
    float shrink[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float16 top = (float16)(-INFINITY);
#pragma unroll
        for (int t = 0; t < KEY_TILES; ++t) {
            s[r][t] = lane < (float)(visible[r] - 16 * t) ? s[r][t] : (float16)(-INFINITY);
            top = max16(top, s[r][t]);
        }
        const float m = fmax(state->m[r], top16(top));
        // A row that has seen nothing yet: any finite reference makes its probabilities exp(-inf) = 0.
        const float reference = m == -INFINITY ? 0.0f : m;
        shrink[r] = softmax_weight(state->m[r], m);
        float16 sum = 0;
#pragma unroll
        for (int t = 0; t < KEY_TILES; ++t) {
            p[r][t] = exp16(s[r][t] - reference);
            sum += p[r][t];
        }
        state->l[r] = state->l[r] * shrink[r] + sum16(sum);
        state->m[r] = m;
    }

    for (int c = 0; c < COLUMNS; c += SLICE) {
        float16 acc[ROWS][SLICE];
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < SLICE; ++i) acc[r][i] = state->acc[r][c + i] * shrink[r];
        for (int j = 0; j < n_keys; ++j) {
            float16 value[SLICE];
#pragma unroll
            for (int i = 0; i < SLICE; ++i) value[i] = CAT(load16_, KV)(v + (size_t)j * HEAD_DIM + (c + i) * 16);
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int i = 0; i < SLICE; ++i) acc[r][i] += value[i] * ((const float*)p[r])[j];
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < SLICE; ++i) state->acc[r][c + i] = acc[r][i];
    }
}

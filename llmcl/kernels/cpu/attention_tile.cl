// One step of attention on a CPU: ROWS queries meet BLOCK_N keys, and their online-softmax states take them in.
//
//   S = q K^T;  m' = max(m, rowmax S);  P = exp(S - m');  l = l exp(m - m') + rowsum P;  acc = acc exp(m - m') + P V
//   (Dao et al., "FlashAttention-2", algorithm 1)
//
// The same step serves decode (ROWS query heads that share a KV head) and prefill (ROWS positions of one head).
// Keys lie in tiles [HEAD_DIM][16], so a vector holds the scores of 16 keys and needs no horizontal sum. Both products
// are computed in blocks whose sums stay in registers: SCORE_ROWS rows by BLOCK_N keys, VALUE_ROWS rows by DV_TILE columns.
// The blocks of a step follow each other while its keys, then its values, are in the first-level cache.
//
// Build: KV, HEAD_DIM, ROWS, SCORE_ROWS and VALUE_ROWS (divide ROWS), BLOCK_N (a multiple of 16), DV_TILE (a multiple of 16
// that divides HEAD_DIM); with KV q8_0 or bf16x2 also those of cpu/q8_0_tile.cl or cpu/paired_tile.cl.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(ROWS) || !defined(SCORE_ROWS) || !defined(VALUE_ROWS) || \
    !defined(BLOCK_N) || !defined(DV_TILE)
#error "cpu/attention_tile.cl needs the build constants KV, HEAD_DIM, ROWS, SCORE_ROWS, VALUE_ROWS, BLOCK_N, DV_TILE"
#endif
#include "kv_cache.cl"
#include "online_softmax.cl"
#include "attention_mods.cl"

#define KEY_TILES (BLOCK_N / 16)
#define COLUMNS (HEAD_DIM / 16)
#define SLICE (DV_TILE / 16)
#define HALF_TILES ((KEY_TILES + 1) / 2)
#define ROW_VECTORS ((ROWS + 15) / 16)

// Scores are in units of log2(e), so that exp2 gives the weights; a score_mod is asked in natural ones.
#define LOG2_E 1.44269504f
#define LN_2 0.693147181f
#if HAS_SCORE_MOD
#define QUERY_SCALE (SCALE)
#else
#define QUERY_SCALE (SCALE * LOG2_E)
#endif

typedef struct {
    float16 q[ROWS][COLUMNS];  // already multiplied by QUERY_SCALE
    float m[ROWS];             // in units of log2(e)
    float16 l[ROWS];           // the sum of exponentials, spread over 16 lanes until the end
    float16 acc[ROWS][COLUMNS];
    int head[ROWS], q_idx[ROWS];  // for the mods
#if KV_QUANTIZED
    char q8[ROWS * HEAD_DIM] __attribute__((aligned(4)));  // the queries, rounded: see cpu/q8_0_tile.cl
    float scale[ROWS][KV_GROUPS];
    int offset[ROWS][KV_GROUPS];
#elif KV_PAIRED
    ushort16 q2[ROWS][COLUMNS];    // the queries, rounded: see cpu/paired_tile.cl
    ushort16 p2[ROWS][KEY_TILES];  // a step's weights, rounded
#endif
} attention_state;

inline void attention_start(attention_state* state) {
    for (int r = 0; r < ROWS; ++r) {
        state->m[r] = -INFINITY;
        state->l[r] = 0;
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
    *s = score_mod16(*s, b, h, q_idx, kv_idx MOD_ARGS) * LOG2_E;
#endif
#if HAS_MASK_MOD
    if (masked) *s = mask_mod16(b, h, q_idx, kv_idx MOD_ARGS) ? *s : (float16)(-INFINITY);
#endif
}
#endif

// The largest of 16 lanes, in all of them; only shuffles and operators, so that it stays in a register.
inline float16 top_of_lanes(float16 v) {
    v = max16(v, v.s89abcdef01234567);
    v = max16(v, v.s456789abcdef0123);
    v = max16(v, v.s23456789abcdef01);
    return max16(v, v.s123456789abcdef0);
}

// round_queries, round_weights, score_tiles and multiply_values:
#if KV_QUANTIZED
#include "cpu/q8_0_tile.cl"
#else
#if KV_PAIRED
#include "cpu/paired_tile.cl"
#endif
#include "cpu/float_tile.cl"
#endif

// Makes weights of the scores in the first `tiles` (a constant) of p; shrink: by how much each row's earlier sums shrink.
inline void weigh_tiles(attention_state* state, float16 (*p)[KEY_TILES], float16* shrink, const int tiles) {
    float16 sum[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        float16 top = p[r][0];
#pragma unroll
        for (int t = 1; t < tiles; ++t) top = max16(top, p[r][t]);
        top = max16(top_of_lanes(top), (float16)(state->m[r]));
        // A row that has seen nothing yet: any finite reference makes its weights exp2(-inf) = 0.
        const float16 reference = top == -INFINITY ? (float16)(0.0f) : top;
        ((float*)shrink)[r] = state->m[r] - reference.s0;
        state->m[r] = top.s0;
        sum[r] = 0;
#pragma unroll
        for (int t = 0; t < tiles; ++t) {
            p[r][t] = exp2_below16(p[r][t] - reference);
            sum[r] += p[r][t];
        }
    }
    for (int i = 0; i < ROW_VECTORS; ++i) shrink[i] = exp2_below16(shrink[i]);
    for (int r = 0; r < ROWS; ++r) state->l[r] = state->l[r] * ((const float*)shrink)[r] + sum[r];
}

inline void add_values(attention_state* state, __global const kv_t* v, const float16 (*p)[KEY_TILES],
                       const float* shrink, const int n_keys) {
    for (int r0 = 0; r0 < ROWS; r0 += VALUE_ROWS) {
        for (int c = 0; c < COLUMNS; c += SLICE) {
            float16 acc[VALUE_ROWS][SLICE];
#pragma unroll
            for (int r = 0; r < VALUE_ROWS; ++r)
#pragma unroll
                for (int i = 0; i < SLICE; ++i) acc[r][i] = state->acc[r0 + r][c + i] * shrink[r0 + r];
            multiply_values(state, v, p, r0, c, n_keys, acc);
#pragma unroll
            for (int r = 0; r < VALUE_ROWS; ++r)
#pragma unroll
                for (int i = 0; i < SLICE; ++i) state->acc[r0 + r][c + i] = acc[r][i];
        }
    }
}

// k, v point at the first key of the tile, which is key `first_key` of the text; n_keys of its BLOCK_N keys exist; row r
// sees the first visible[r] of them (row 0 the fewest), and of those only what mask_mod lets it see if the tile is `masked`.
// Keys that do not exist are computed with and discarded, values that do not exist are never read.
inline void attention_tile(attention_state* state, __global const kv_t* k, __global const kv_t* v,
                           const int n_keys, const int* visible, const int batch, const int first_key,
                           const bool masked MOD_PARAMS) {
    const float16 lane = (float16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int n_tiles = n_keys <= 16 * HALF_TILES ? HALF_TILES : KEY_TILES;  // at the end and the diagonal half of them do
    float16 p[ROWS][KEY_TILES];  // scores, then weights
    if (n_tiles < KEY_TILES)
        score_tiles(state, k, p, HALF_TILES);
    else
        score_tiles(state, k, p, KEY_TILES);

#if HAS_SCORE_MOD || HAS_MASK_MOD
    for (int r = 0; r < ROWS; ++r) {
        for (int t = 0; t < KEY_TILES; ++t) {
            if (16 * t >= n_keys) break;
            apply_mods(&p[r][t], batch, state->head[r], state->q_idx[r], first_key + 16 * t, first_key + n_keys - 1,
                       masked MOD_ARGS);
        }
    }
#endif
    if (visible[0] < 16 * n_tiles)
        for (int r = 0; r < ROWS; ++r)
            for (int t = 0; t < n_tiles; ++t)
                p[r][t] = lane < (float)(visible[r] - 16 * t) ? p[r][t] : (float16)(-INFINITY);

    float16 shrink[ROW_VECTORS];
    if (n_tiles < KEY_TILES)
        weigh_tiles(state, p, shrink, HALF_TILES);
    else
        weigh_tiles(state, p, shrink, KEY_TILES);
    round_weights(state, p, n_tiles);
    add_values(state, v, p, (const float*)shrink, n_keys);
}

// One attention step on a CPU: multiplies ROWS queries with BLOCK_N keys and updates the queries' online-softmax states.
//
//   S = q K^T;  m' = max(m, rowmax S);  P = exp(S - m');  l = l exp(m - m') + rowsum P;  acc = acc exp(m - m') + P V
//   (Dao et al., "FlashAttention-2", algorithm 1; m' = m unless a score is far above m: see "FlashAttention-4")
//
// The same step serves decode (ROWS query heads with a common KV head) and prefill (ROWS positions in one head).
// Keys lie in tiles [HEAD_DIM][16], so a vector holds the scores for 16 keys and needs no horizontal sum. Both products
// are computed in blocks with sums in registers: SCORE_ROWS rows by BLOCK_N keys, VALUE_ROWS rows by DV_TILE columns.
// A step's blocks follow each other while its keys, then its values, are in the first-level cache.
//
// With AHEAD a kernel sets `later_k` and `later_v` to the keys and values of a later step, which are prefetched during this step
// (float_tile.cl).
//
// Build: KV, HEAD_DIM, ROWS, SCORE_ROWS and VALUE_ROWS (divide ROWS), BLOCK_N (a multiple of 16), DV_TILE (a multiple of 16
// that divides HEAD_DIM); with KV q8_0 or bf16x2 also the constants for cpu/q8_0_tile.cl or cpu/paired_tile.cl.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(ROWS) || !defined(SCORE_ROWS) || !defined(VALUE_ROWS) || \
    !defined(BLOCK_N) || !defined(DV_TILE)
#error "cpu/attention_tile.cl needs the build constants KV, HEAD_DIM, ROWS, SCORE_ROWS, VALUE_ROWS, BLOCK_N, DV_TILE"
#endif
#include "common/kv_cache.cl"
#include "common/online_softmax.cl"
#include "common/attention_mods.cl"

#define KEY_TILES (BLOCK_N / 16)
#define COLUMNS (HEAD_DIM / 16)
#define SLICE (DV_TILE / 16)
#define SCORE_BLOCKS (ROWS / SCORE_ROWS)

// Scores are in units of log2(e), so exp2 gives the weights; a score_mod gets natural units.
#define LOG2_E 1.44269504f
#define LN_2 0.693147181f
#if HAS_SCORE_MOD
#define QUERY_SCALE (SCALE)
#else
#define QUERY_SCALE (SCALE * LOG2_E)
#endif

// If fewer keys than BLOCK_N are left, a step has a multiple of TILE_STEP tiles. Each multiple is compiled separately; with 24 sums
// filling the registers, more than two multiples compile too slowly (1.3 instead of 0.5 s).
#if KV_PAIRED
#define TILE_STEP 1
#define weight_vector ushort16
#define exp2_weight16 exp2_short16
#else
#define TILE_STEP ((KEY_TILES + 1) / 2)
#define weight_vector float16
#define exp2_weight16 exp2_below16
#endif

#if MAX_SCORES
#define RAISE_ABOVE 0.0f  // the reference is the largest score
#else
#define RAISE_ABOVE 16.0f  // float32 sums of weights up to 2^16 are as exact as sums of weights up to 1
#endif

typedef struct {
    float16 q[ROWS][COLUMNS];   // already multiplied by QUERY_SCALE
    float m[ROWS];              // the exponentials' reference, in units of log2(e); -inf before the first key
    float start[ROWS];          // -m, 0 before the first key
    float limit[SCORE_BLOCKS];  // how far a score may exceed its reference before the block's references are raised
    float16 l[ROWS];            // the sum of exponentials, spread over 16 lanes until the end
    float16 acc[ROWS][COLUMNS];
    int head[ROWS], q_idx[ROWS];  // for the mods
#ifdef AHEAD
    __global const kv_t *later_k, *later_v;
#endif
#if KV_QUANTIZED
    char q8[ROWS * HEAD_DIM] __attribute__((aligned(4)));  // the queries, rounded: see cpu/q8_0_tile.cl
    float scale[ROWS][KV_GROUPS];
    int offset[ROWS][KV_GROUPS];
#elif KV_PAIRED
    ushort16 q2[ROWS][COLUMNS];    // the queries, rounded: see cpu/paired_tile.cl
#endif
} attention_state;

inline void attention_start(attention_state* state) {
    for (int r = 0; r < ROWS; ++r) {
        state->m[r] = -INFINITY;
        state->start[r] = 0;
        state->l[r] = 0;
        for (int c = 0; c < COLUMNS; ++c) state->acc[r][c] = 0;
    }
    for (int i = 0; i < SCORE_BLOCKS; ++i) state->limit[i] = -INFINITY;
}

#if HAS_SCORE_MOD || HAS_MASK_MOD
WIDE_MODS

// Applies the mods to scores for one row and 16 keys; `last` is the last existing key, so lookups stay in bounds.
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

// The largest of 16 lanes, in all lanes; only shuffles and operators, so the value stays in a register.
inline float16 top_of_lanes(float16 v) {
    v = max16(v, v.s89abcdef01234567);
    v = max16(v, v.s456789abcdef0123);
    v = max16(v, v.s23456789abcdef01);
    return max16(v, v.s123456789abcdef0);
}

#if !KV_PAIRED
// Stores a row's weights in p and adds them to its sum l.
IN_REGISTERS inline void keep_weights(const float16* weights, weight_vector* p, float16* l, const int tiles) {
    float16 sum = 0;
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
        p[t] = weights[t];
        sum += weights[t];
    }
    *l += sum;
}
#endif

// round_queries, add_scores, multiply_values and keep_weights:
#if KV_QUANTIZED
#include "cpu/q8_0_tile.cl"
#else
#if KV_PAIRED
#include "cpu/paired_tile.cl"
#endif
#include "cpu/float_tile.cl"
#endif

// Raises the references of SCORE_ROWS rows from r0 on to their largest scores s, and scales down the rows' previous sums.
IN_REGISTERS inline void raise_references(attention_state* state, const int r0, float16 (*s)[KEY_TILES],
                                          const int tiles) {
    float16 shrink[(SCORE_ROWS + 15) / 16];
    bool all_seen = true;
#pragma unroll
    for (int r = 0; r < SCORE_ROWS; ++r) {
        float16 top = s[r][0];
#pragma unroll
        for (int t = 1; t < tiles; ++t) top = max16(top, s[r][t]);
        const float m = state->m[r0 + r], above = top_of_lanes(top).s0;
        const float raised = m == -INFINITY ? above : above > 0.0f ? m + above : m;
        // A row without visible keys yet: any finite reference makes its weights exp2(-inf) = 0.
        const float start = raised == -INFINITY ? 0.0f : -raised, change = start - state->start[r0 + r];
        state->m[r0 + r] = raised;
        state->start[r0 + r] = start;
        all_seen = all_seen && raised > -INFINITY;
        ((float*)shrink)[r] = change < 0.0f ? change : 0.0f;  // above 0 only if there is nothing to scale down
#pragma unroll
        for (int t = 0; t < tiles; ++t) s[r][t] += change;
    }
    state->limit[r0 / SCORE_ROWS] = all_seen ? RAISE_ABOVE : -INFINITY;
    for (int i = 0; i < (SCORE_ROWS + 15) / 16; ++i) shrink[i] = exp2_below16(shrink[i]);
    for (int r = 0; r < SCORE_ROWS; ++r) {
        state->l[r0 + r] *= ((const float*)shrink)[r];
        for (int c = 0; c < COLUMNS; ++c) state->acc[r0 + r][c] *= ((const float*)shrink)[r];
    }
}

// Computes the weights p for SCORE_ROWS rows from r0 on and a step's first `tiles` (a constant) times 16 keys. Scores start from minus
// the reference, so no subtraction is needed. The first step's reference mostly lasts: the maximum is taken over all rows at once, and
// per row only if it is too high.
IN_REGISTERS inline void weigh_keys(attention_state* state, __global const kv_t* k, weight_vector (*p)[KEY_TILES],
                                    const int r0, const int tiles, const int n_keys, const int* visible,
                                    const int batch, const int first_key, const bool masked MOD_PARAMS) {
    const float16 lane = (float16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    float16 s[SCORE_ROWS][KEY_TILES];  // scores relative to the reference, then weights
#pragma unroll
    for (int r = 0; r < SCORE_ROWS; ++r)
#pragma unroll
        for (int t = 0; t < tiles; ++t) s[r][t] = HAS_SCORE_MOD ? 0.0f : state->start[r0 + r];
    add_scores(state, k, r0, s, tiles);
#if HAS_SCORE_MOD || HAS_MASK_MOD
    if (HAS_SCORE_MOD || masked) {
        float16 given[SCORE_ROWS][KEY_TILES];  // in memory, so the mods are compiled once and not per vector
#pragma unroll
        for (int r = 0; r < SCORE_ROWS; ++r)
#pragma unroll
            for (int t = 0; t < tiles; ++t) given[r][t] = s[r][t];
        for (int r = 0; r < SCORE_ROWS; ++r)
            for (int t = 0; 16 * t < n_keys; ++t)
                apply_mods(&given[r][t], batch, state->head[r0 + r], state->q_idx[r0 + r], first_key + 16 * t,
                           first_key + n_keys - 1, masked MOD_ARGS);
#pragma unroll
        for (int r = 0; r < SCORE_ROWS; ++r)
#pragma unroll
            for (int t = 0; t < tiles; ++t) s[r][t] = given[r][t] + (HAS_SCORE_MOD ? state->start[r0 + r] : 0.0f);
    }
#endif
    if (visible[r0] < 16 * tiles) {
#pragma unroll
        for (int r = 0; r < SCORE_ROWS; ++r)
#pragma unroll
            for (int t = 0; t < tiles; ++t)
                s[r][t] = lane < (float)(visible[r0 + r] - 16 * t) ? s[r][t] : (float16)(-INFINITY);
    }
    float16 top = -INFINITY;  // ignores NaN, which concerns a single row
#pragma unroll
    for (int r = 0; r < SCORE_ROWS; ++r)
#pragma unroll
        for (int t = 0; t < tiles; ++t) top = max16(s[r][t], top);
    if (top_of_lanes(top).s0 > state->limit[r0 / SCORE_ROWS]) raise_references(state, r0, s, tiles);
#pragma unroll
    for (int r = 0; r < SCORE_ROWS; ++r) {
#pragma unroll
        for (int t = 0; t < tiles; ++t) s[r][t] = exp2_weight16(s[r][t]);
        keep_weights(s[r], p[r0 + r], &state->l[r0 + r], tiles);
    }
}

inline void add_values(attention_state* state, __global const kv_t* v, const weight_vector (*p)[KEY_TILES], const int n_keys,
                       const int* visible) {
    for (int r0 = 0; r0 < ROWS; r0 += VALUE_ROWS) {
        // The keys visible to all rows. A weight of 0 would not hide a NaN value.
        const int seen = min(visible[r0], n_keys) / AT_ONCE * AT_ONCE;
        for (int c = 0; c < COLUMNS; c += SLICE) {
            float16 acc[VALUE_ROWS][SLICE];
#pragma unroll
            for (int r = 0; r < VALUE_ROWS; ++r)
#pragma unroll
                for (int i = 0; i < SLICE; ++i) acc[r][i] = state->acc[r0 + r][c + i];
            multiply_values(state, v, p, r0, c, seen, acc);
#pragma unroll
            for (int r = 0; r < VALUE_ROWS; ++r)
#pragma unroll
                for (int i = 0; i < SLICE; ++i) state->acc[r0 + r][c + i] = acc[r][i];
        }
        for (int r = r0; r < r0 + VALUE_ROWS; ++r) add_last_values(state, v, p[r], r, seen, min(visible[r], n_keys));
    }
}

// k, v point at the tile's first key, number `first_key` in the text; n_keys of its BLOCK_N keys exist. Row r sees the first visible[r]
// keys (row 0 the fewest), filtered by mask_mod if the tile is `masked`.
// Scores for missing keys are computed and discarded; missing values are never read.
inline void attention_tile(attention_state* state, __global const kv_t* k, __global const kv_t* v,
                           const int n_keys, const int* visible, const int batch, const int first_key,
                           const bool masked MOD_PARAMS) {
    weight_vector p[ROWS][KEY_TILES];
    const int n_tiles = (n_keys + 16 * TILE_STEP - 1) / (16 * TILE_STEP) * TILE_STEP;
    for (int r0 = 0; r0 < ROWS; r0 += SCORE_ROWS) {
#pragma unroll
        for (int tiles = TILE_STEP; tiles <= KEY_TILES; tiles += TILE_STEP)
            if (tiles == n_tiles) weigh_keys(state, k, p, r0, tiles, n_keys, visible, batch, first_key, masked MOD_ARGS);
    }
    add_values(state, v, p, n_keys, visible);
}

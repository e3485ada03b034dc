// Decode attention of one work-group, for a KV head and a split of its keys: what nvidia/attention_decode.cl and
// nvidia/decode_layers.cl have in common. Formula, layouts and the split of the keys as in cpu/attention_decode.cl.
//
// The warps of a group take the split's keys in runs of 16 by turns, each with an online-softmax state of its own, so that no
// barrier stands in the loop. All keys and values of a run are asked for before the first is used:
//   scores: a lane reads 8 keys (of parity lane % 2) of every 16th dimension; the lanes' sums give a lane one key
//   values: lane i owns columns COLUMNS i .. COLUMNS i + COLUMNS - 1 of every value of the run
// At the end a group merges its warps' states; what becomes of the splits' states is the kernels'.
//
// Build: KV (f16 or bf16), HEAD_DIM (64, 128 or 256), N_Q_HEADS, N_KV_HEADS, GROUP_SIZE, CAPACITY (a multiple of 16),
// N_SPLITS (at most WARPS HEAD_DIM), SCALE, WARPS. Local memory: ATTEND_FLOATS floats.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(GROUP_SIZE) || \
    !defined(CAPACITY) || !defined(N_SPLITS) || !defined(SCALE) || !defined(WARPS) || !defined(STATE_POSITION)
#error "nvidia/attend.cl needs the build constants KV, HEAD_DIM, N_Q_HEADS, N_KV_HEADS, GROUP_SIZE, CAPACITY, N_SPLITS, SCALE, WARPS and those of the step state"
#endif
#include "common.cl"
#include "nvidia/ptx.cl"
#include "nvidia/tagged.cl"
#include "online_softmax.cl"
#include "attention_mods.cl"
#include "kv_address.cl"

#define COLUMNS (HEAD_DIM / WARP)
#define LOCAL_SIZE (WARP * WARPS)
#define KEY_RUN 16  // keys of a warp at once
// q, weights, m and l, accumulators
#define ATTEND_FLOATS (GROUP_SIZE * (HEAD_DIM + WARPS * (KEY_RUN + 2 + HEAD_DIM)))

// Where the warps' accumulators begin in the scratch.
#define STATES_AT (GROUP_SIZE * (HEAD_DIM + WARPS * KEY_RUN))

#if N_SPLITS > WARPS * HEAD_DIM
#error "nvidia/attend.cl: N_SPLITS is at most WARPS HEAD_DIM"
#endif

#if COLUMNS == 2
typedef uint value_words;
#define load_value load4_words
#elif COLUMNS == 4
typedef uint2 value_words;
#define load_value load8_words
#elif COLUMNS == 8
typedef uint4 value_words;
#define load_value load16_words
#else
#error "nvidia/attend.cl: HEAD_DIM is 64, 128 or 256"
#endif

// A group's share of a head's keys: `split` of n_splits, which has keys if it is below it.
typedef struct {
    int head, split, n_splits, position, first, end;
    bool has_new;  // whether the group appends the new position's key and value
    int queries;   // that a warp takes: all of the head, or for few keys one, so that more warps work at once
    size_t row;    // of the cache, where the head begins
} key_share;

#define SLOTS_OF(queries) (WARPS / (GROUP_SIZE / (queries)))  // runs of keys that a group has in hand at once

inline key_share share_of_keys(const int head, const int split, __global const int* state MOD_PARAMS) {
    const int position = state[STATE_POSITION], kv_len = position + 1;
    // The splits share what comes after the keys that mask_mod hides from the beginning on.
    const int visible_from = first_visible(0, head * GROUP_SIZE, GROUP_SIZE, (int2)(position), kv_len, KEY_RUN MOD_ARGS);
    key_share s = {head, split, 1, position, visible_from, kv_len, true, GROUP_SIZE, (size_t)head * CAPACITY};
    if (visible_from >= kv_len) return s;  // one split, without keys
    // No more splits than there are keys for all their warps: a short context needs no merge.
    s.n_splits = min(N_SPLITS, (kv_len - visible_from + WARPS * KEY_RUN - 1) / (WARPS * KEY_RUN));
    const int per_split = (kv_len - visible_from + s.n_splits * KEY_RUN - 1) / (s.n_splits * KEY_RUN) * KEY_RUN;
    s.first = visible_from + split * per_split;
    s.end = min(kv_len, s.first + per_split);
    s.has_new = s.first <= position && position < s.end;
    if (per_split <= 2 * KEY_RUN * SLOTS_OF(1)) s.queries = 1;
    return s;
}

// Asks the second-level cache for the keys and values of a warp's first run, which may be before the queries have come.
inline void fetch_run(const key_share* s, __global const int* state, __global const CAT(KV, _t)* k_cache,
                      __global const CAT(KV, _t)* v_cache) {
    const int lid = get_local_id(0), j = s->first + lid / WARP * KEY_RUN;
    if (j >= s->end) return;
    const size_t at = (s->row + kv_row(state, j)) * HEAD_DIM;
    for (int i = lid % WARP; i < HEAD_DIM / 4; i += WARP) {  // lines of 128 bytes
        fetch_line(k_cache + at + i * 64);
        fetch_line(v_cache + at + i * 64);
    }
}

// The states of the warps over the group's keys, `queries` of the head's queries to a warp: 1 or all.
inline void attend_keys(const key_share* s, const int queries, __global const int* state,
                        __global const CAT(KV, _t)* k_cache, __global const CAT(KV, _t)* v_cache,
                        __local float* scratch MOD_PARAMS) {
    __local float(*q)[GROUP_SIZE] = (__local float(*)[GROUP_SIZE])scratch;
    __local float(*p)[KEY_RUN][GROUP_SIZE] = (__local float(*)[KEY_RUN][GROUP_SIZE])(scratch + HEAD_DIM * GROUP_SIZE);
    __local float(*warp_acc)[GROUP_SIZE][HEAD_DIM] = (__local float(*)[GROUP_SIZE][HEAD_DIM])&p[WARPS][0][0];
    __local float(*warp_m)[GROUP_SIZE] = (__local float(*)[GROUP_SIZE])&warp_acc[WARPS][0][0];
    __local float(*warp_l)[GROUP_SIZE] = &warp_m[WARPS];
    const int lid = get_local_id(0), lane = lid % WARP, warp = lid / WARP, head = s->head, position = s->position;
    const bool all = queries == GROUP_SIZE;
    const int slots = SLOTS_OF(queries), slot = all ? warp : warp % slots, first = all ? 0 : warp / slots;
    if (first >= GROUP_SIZE) return;  // where the group's warps are no multiple of the queries
    float m[GROUP_SIZE], l[GROUP_SIZE], acc[GROUP_SIZE][COLUMNS];  // l: of the lane's keys only
#pragma unroll
    for (int g = 0; g < queries; ++g) {
        m[g] = -INFINITY;
        l[g] = 0.0f;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) acc[g][c] = 0.0f;
    }
    const int own_key = (lane & 1) * 8 + sum8_index(lane);
    const bool owner = !(lane & 2);
    for (int j = s->first + slot * KEY_RUN; j < s->end; j += slots * KEY_RUN) {
        const int n_keys = min(KEY_RUN, s->end - j), row = kv_row(state, j);
        const int seen_as = tile_class(0, head * GROUP_SIZE, GROUP_SIZE, (int2)(position), j, j + n_keys MOD_ARGS);
        if (seen_as == TILE_HIDDEN) continue;
        __global const CAT(KV, _t)* k = k_cache + (s->row + row) * HEAD_DIM + lane * 8;
        __global const CAT(KV, _t)* v = v_cache + (s->row + row) * HEAD_DIM + lane * COLUMNS;
        uint4 keys[HEAD_DIM / 16];
        value_words values[KEY_RUN];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; ++i) keys[i] = load16_words(k + i * 256);
#pragma unroll
        for (int i = 0; i < KEY_RUN; ++i) values[i] = load_value(v + (size_t)min(i, n_keys - 1) * HEAD_DIM);
        float dots[GROUP_SIZE][8];
#pragma unroll
        for (int g = 0; g < queries; ++g)
#pragma unroll
            for (int i = 0; i < 8; ++i) dots[g][i] = 0.0f;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; ++i) {
            const uint pairs[4] = {keys[i].x, keys[i].y, keys[i].z, keys[i].w};
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float2 key = CAT(widen_, KV)(pairs[c]);
#pragma unroll
                for (int g = 0; g < queries; ++g) {
                    dots[g][2 * c] += q[i * 16 + lane / 2][first + g] * key.x;
                    dots[g][2 * c + 1] += q[i * 16 + lane / 2][first + g] * key.y;
                }
            }
        }
#pragma unroll
        for (int g = 0; g < queries; ++g) {
            float score = sum8(dots[g], lane);
            bool seen = own_key < n_keys;
#if HAS_SCORE_MOD
            score = score_mod(score, 0, head * GROUP_SIZE + first + g, position, j + own_key MOD_ARGS);
#endif
#if HAS_MASK_MOD
            if (seen && seen_as == TILE_MIXED)
                seen = mask_mod(0, head * GROUP_SIZE + first + g, position, j + own_key MOD_ARGS);
#endif
            if (!seen) score = -INFINITY;
            const float top = fmax(m[g], warp_max(score));
            const float e = softmax_weight(score, top), shrink = softmax_weight(m[g], top);
            if (owner) p[warp][own_key][g] = e;
            l[g] = l[g] * shrink + (owner ? e : 0.0f);
            m[g] = top;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) acc[g][c] *= shrink;
        }
        warp_sync();
#pragma unroll
        for (int i = 0; i < KEY_RUN; ++i) {
            const uint* pairs = (const uint*)&values[i];
#pragma unroll
            for (int c = 0; c < COLUMNS / 2; ++c) {
                const float2 value = CAT(widen_, KV)(pairs[c]);
#pragma unroll
                for (int g = 0; g < queries; ++g) {
                    const float e = p[warp][i][g];  // 0 past the last key
                    acc[g][2 * c] += e * value.x;
                    acc[g][2 * c + 1] += e * value.y;
                }
            }
        }
        warp_sync();
    }
#pragma unroll
    for (int g = 0; g < queries; ++g) {
        const float sum = warp_sum(l[g]);
        if (lane == 0) {
            warp_m[slot][first + g] = m[g];
            warp_l[slot][first + g] = sum;
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) warp_acc[slot][first + g][lane * COLUMNS + c] = acc[g][c];
    }
}

// The states of a group's warps over its share of the keys, left in `scratch` for warps_state. qkv: of the step, with tags if
// `wait`. For all work-items of a group.
inline void attend(const key_share* s, __global const float* qkv, const uint tag, const bool wait,
                   __global const float* rope, __global const int* state, __global CAT(KV, _t)* k_cache,
                   __global CAT(KV, _t)* v_cache, __local float* scratch MOD_PARAMS) {
    __local float(*q)[GROUP_SIZE] = (__local float(*)[GROUP_SIZE])scratch;
    const int lid = get_local_id(0), head = s->head, position = s->position;

    // The head's queries, and in the split that has the new position its key and value. An item has two elements of a row, which
    // rotate together.
    const int row_new = kv_row(state, position);
    __global CAT(KV, _t)* k_new = k_cache + (s->row + row_new / 16 * 16) * HEAD_DIM + row_new % 16;
    __global CAT(KV, _t)* v_new = v_cache + (s->row + row_new) * HEAD_DIM;
    for (int i = lid; i < (s->has_new ? GROUP_SIZE + 2 : GROUP_SIZE) * (HEAD_DIM / 2); i += LOCAL_SIZE) {
        const int row = i / (HEAD_DIM / 2), column = i % (HEAD_DIM / 2);
        const float c = rope[column], sine = rope[HEAD_DIM / 2 + column];
        const int source = row < GROUP_SIZE ? head * GROUP_SIZE + row : N_Q_HEADS + (row - GROUP_SIZE) * N_KV_HEADS + head;
        __global const float* x = qkv + source * HEAD_DIM + column;
        const float2 v = receive2(x, x + HEAD_DIM / 2, tag, wait);
        const float2 rotated = (float2)(v.x * c + -v.y * sine, v.y * c + v.x * sine);
        if (row < GROUP_SIZE) {
            q[column][row] = rotated.x * SCALE;
            q[column + HEAD_DIM / 2][row] = rotated.y * SCALE;
        } else if (row == GROUP_SIZE) {
            CAT(store1_, KV)(rotated.x, k_new + column * 16);
            CAT(store1_, KV)(rotated.y, k_new + (column + HEAD_DIM / 2) * 16);
        } else {
            CAT(store1_, KV)(v.x, v_new + column);
            CAT(store1_, KV)(v.y, v_new + column + HEAD_DIM / 2);
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);

    if (s->queries == GROUP_SIZE)
        attend_keys(s, GROUP_SIZE, state, k_cache, v_cache, scratch MOD_ARGS);
    else
        attend_keys(s, 1, state, k_cache, v_cache, scratch MOD_ARGS);
    barrier(CLK_LOCAL_MEM_FENCE);
}

// The state of a group's warps together, for element i of [GROUP_SIZE][HEAD_DIM].
typedef struct {
    float m, l, acc;
} softmax_state;

inline softmax_state warps_state(const key_share* s, const int i, __local const float* scratch) {
    __local float(*warp_acc)[GROUP_SIZE][HEAD_DIM] = (__local float(*)[GROUP_SIZE][HEAD_DIM])(scratch + STATES_AT);
    __local float(*warp_m)[GROUP_SIZE] = (__local float(*)[GROUP_SIZE])&warp_acc[WARPS][0][0];
    __local float(*warp_l)[GROUP_SIZE] = &warp_m[WARPS];
    const int slots = SLOTS_OF(s->queries);
    const int n_warps = min(slots, (s->end - s->first + KEY_RUN - 1) / KEY_RUN);  // the others have no keys
    const int g = i / HEAD_DIM, column = i % HEAD_DIM;
    softmax_state all = {-INFINITY, 0.0f, 0.0f};
#pragma unroll 4
    for (int w = 0; w < n_warps; ++w) all.m = fmax(all.m, warp_m[w][g]);
#pragma unroll 4
    for (int w = 0; w < n_warps; ++w) {
        const float weight = softmax_weight(warp_m[w][g], all.m);
        all.l += weight * warp_l[w][g];
        all.acc += weight * warp_acc[w][g][column];
    }
    return all;
}

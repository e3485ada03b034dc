// Decode attention of one work-group, for a KV head and a split of its keys: what nvidia/attention_decode.cl and
// nvidia/decode_layers.cl have in common. Formula, layouts and the split of the keys as in cpu/attention_decode.cl.
//
// The warps of a group take the split's keys in runs of 16 by turns, each with an online-softmax state of its own, so that no
// barrier stands in the loop. All keys and values of a run are asked for before the first is used:
//   scores: a lane reads 8 keys (of parity lane % 2) of every 16th dimension; the lanes' sums give a lane one key
//   values: lane i owns columns COLUMNS i .. COLUMNS i + COLUMNS - 1 of every value of the run
// At the end a group merges its warps' states. The last of a head's groups to finish merges those of the splits, as
// attention_merge.cl does elsewhere: a launch less.
//
// out       float [N_Q_HEADS][HEAD_DIM]
// arrivals  int [N_KV_HEADS], 0 before and after: groups of the head that have left their state
//
// Build: KV (f16 or bf16), HEAD_DIM (64, 128 or 256), N_Q_HEADS, N_KV_HEADS, GROUP_SIZE, CAPACITY (a multiple of 16),
// N_SPLITS (at most WARPS HEAD_DIM), SCALE, WARPS. Local memory: ATTEND_FLOATS floats and an int.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(GROUP_SIZE) || \
    !defined(CAPACITY) || !defined(N_SPLITS) || !defined(SCALE) || !defined(WARPS) || !defined(STATE_POSITION)
#error "nvidia/attend.cl needs the build constants KV, HEAD_DIM, N_Q_HEADS, N_KV_HEADS, GROUP_SIZE, CAPACITY, N_SPLITS, SCALE, WARPS and those of the step state"
#endif
#include "common.cl"
#include "nvidia/ptx.cl"
#include "online_softmax.cl"
#include "attention_mods.cl"
#include "rope_row.cl"
#include "kv_address.cl"

#define COLUMNS (HEAD_DIM / WARP)
#define LOCAL_SIZE (WARP * WARPS)
#define KEY_RUN 16  // keys of a warp at once
// q, weights, m and l, accumulators
#define ATTEND_FLOATS (GROUP_SIZE * (HEAD_DIM + WARPS * (KEY_RUN + 2 + HEAD_DIM)))

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


// position: state[STATE_POSITION].
inline void attend(const int head, const int split, const int position, __global const float* qkv, __global const float* rope,
                   __global const int* state, __global CAT(KV, _t)* k_cache, __global CAT(KV, _t)* v_cache,
                   __global float* part_ml, __global float* part_acc, __global float* out, __global int* arrivals,
                   __local float* scratch, __local int* arrived MOD_PARAMS) {
    __local float(*q)[GROUP_SIZE] = (__local float(*)[GROUP_SIZE])scratch;
    __local float(*p)[KEY_RUN][GROUP_SIZE] = (__local float(*)[KEY_RUN][GROUP_SIZE])(scratch + HEAD_DIM * GROUP_SIZE);
    __local float(*warp_acc)[GROUP_SIZE][HEAD_DIM] = (__local float(*)[GROUP_SIZE][HEAD_DIM])&p[WARPS][0][0];
    __local float(*warp_m)[GROUP_SIZE] = (__local float(*)[GROUP_SIZE])&warp_acc[WARPS][0][0];
    __local float(*warp_l)[GROUP_SIZE] = &warp_m[WARPS];
    const int lid = get_local_id(0), lane = lid % WARP, warp = lid / WARP;
    const int kv_len = position + 1;
    // The splits share what comes after the keys that mask_mod hides from the beginning on.
    const int2 query = (int2)(position);
    const int visible_from = first_visible(0, head * GROUP_SIZE, GROUP_SIZE, query, kv_len, KEY_RUN MOD_ARGS);
    // No more splits than there are keys for all their warps: a short context needs no merge.
    const int n_splits = min(N_SPLITS, (kv_len - visible_from + WARPS * KEY_RUN - 1) / (WARPS * KEY_RUN));
    if (split >= n_splits) return;
    const int per_split = (kv_len - visible_from + n_splits * KEY_RUN - 1) / (n_splits * KEY_RUN) * KEY_RUN;
    const int first = visible_from + split * per_split, end = min(kv_len, first + per_split);
    k_cache += (size_t)head * CAPACITY * HEAD_DIM;
    v_cache += (size_t)head * CAPACITY * HEAD_DIM;

    // The head's queries, and in the split that has the new position its key and value: rows of one loop, so that all of them
    // are asked for before the first has come.
    const bool has_new = first <= position && position < end;
    const int row_new = kv_row(state, position);
    __global CAT(KV, _t)* k_new = k_cache + (size_t)(row_new / 16) * HEAD_DIM * 16 + row_new % 16;
    __global CAT(KV, _t)* v_new = v_cache + (size_t)row_new * HEAD_DIM;
#pragma unroll
    for (int i = lid; i < (GROUP_SIZE + 2) * HEAD_DIM; i += LOCAL_SIZE) {
        const int row = i / HEAD_DIM, column = i % HEAD_DIM;
        if (row < GROUP_SIZE)
            q[column][row] = rope_element(qkv + (head * GROUP_SIZE + row) * HEAD_DIM, rope, column) * SCALE;
        else if (has_new) {
            __global const float* x = qkv + (N_Q_HEADS + (row - GROUP_SIZE) * N_KV_HEADS + head) * HEAD_DIM;
            if (row == GROUP_SIZE)
                CAT(store1_, KV)(rope_element(x, rope, column), k_new + column * 16);
            else
                CAT(store1_, KV)(x[column], v_new + column);
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);

    float m[GROUP_SIZE], l[GROUP_SIZE], acc[GROUP_SIZE][COLUMNS];  // l: of the lane's keys only
#pragma unroll
    for (int g = 0; g < GROUP_SIZE; ++g) {
        m[g] = -INFINITY;
        l[g] = 0.0f;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) acc[g][c] = 0.0f;
    }
    const int own_key = (lane & 1) * 8 + sum8_index(lane);
    const bool owner = !(lane & 2);
    for (int j = first + warp * KEY_RUN; j < end; j += WARPS * KEY_RUN) {
        const int n_keys = min(KEY_RUN, end - j), row = kv_row(state, j);
        const int seen_as = tile_class(0, head * GROUP_SIZE, GROUP_SIZE, query, j, j + n_keys MOD_ARGS);
        if (seen_as == TILE_HIDDEN) continue;
        __global const CAT(KV, _t)* k = k_cache + (size_t)row * HEAD_DIM + lane * 8;
        __global const CAT(KV, _t)* v = v_cache + (size_t)row * HEAD_DIM + lane * COLUMNS;
        uint4 keys[HEAD_DIM / 16];
        value_words values[KEY_RUN];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; ++i) keys[i] = load16_words(k + i * 256);
#pragma unroll
        for (int i = 0; i < KEY_RUN; ++i) values[i] = load_value(v + (size_t)min(i, n_keys - 1) * HEAD_DIM);
        float s[GROUP_SIZE][8];
#pragma unroll
        for (int g = 0; g < GROUP_SIZE; ++g)
#pragma unroll
            for (int i = 0; i < 8; ++i) s[g][i] = 0.0f;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; ++i) {
            const uint pairs[4] = {keys[i].x, keys[i].y, keys[i].z, keys[i].w};
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float2 key = CAT(widen_, KV)(pairs[c]);
#pragma unroll
                for (int g = 0; g < GROUP_SIZE; ++g) {
                    s[g][2 * c] += q[i * 16 + lane / 2][g] * key.x;
                    s[g][2 * c + 1] += q[i * 16 + lane / 2][g] * key.y;
                }
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP_SIZE; ++g) {
            float score = sum8(s[g], lane);
            bool seen = own_key < n_keys;
#if HAS_SCORE_MOD
            score = score_mod(score, 0, head * GROUP_SIZE + g, position, j + own_key MOD_ARGS);
#endif
#if HAS_MASK_MOD
            if (seen && seen_as == TILE_MIXED) seen = mask_mod(0, head * GROUP_SIZE + g, position, j + own_key MOD_ARGS);
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
                for (int g = 0; g < GROUP_SIZE; ++g) {
                    const float e = p[warp][i][g];  // 0 past the last key
                    acc[g][2 * c] += e * value.x;
                    acc[g][2 * c + 1] += e * value.y;
                }
            }
        }
        warp_sync();
    }
#pragma unroll
    for (int g = 0; g < GROUP_SIZE; ++g) {
        const float sum = warp_sum(l[g]);
        if (lane == 0) {
            warp_m[warp][g] = m[g];
            warp_l[warp][g] = sum;
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) warp_acc[warp][g][lane * COLUMNS + c] = acc[g][c];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const int n_warps = min(WARPS, (end - first + KEY_RUN - 1) / KEY_RUN);  // the others have no keys
    for (int i = lid; i < GROUP_SIZE * HEAD_DIM; i += LOCAL_SIZE) {
        const int g = i / HEAD_DIM, column = i % HEAD_DIM;
        float top = -INFINITY, whole = 0.0f, sum = 0.0f;
#pragma unroll 4
        for (int w = 0; w < n_warps; ++w) top = fmax(top, warp_m[w][g]);
#pragma unroll 4
        for (int w = 0; w < n_warps; ++w) {
            const float weight = softmax_weight(warp_m[w][g], top);
            whole += weight * warp_l[w][g];
            sum += weight * warp_acc[w][g][column];
        }
        if (n_splits == 1) {
            out[(head * GROUP_SIZE + g) * HEAD_DIM + column] = sum * softmax_norm(whole);
            continue;
        }
        const int part = (head * GROUP_SIZE + g) * N_SPLITS + split;
        if (column == 0) {
            part_ml[2 * part] = top;
            part_ml[2 * part + 1] = whole;
        }
        part_acc[(size_t)part * HEAD_DIM + column] = sum;
    }
    if (n_splits == 1) return;
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (lid == 0) {  // its fences cover what the barriers order before and after them
        device_fence();
        *arrived = atomic_inc(arrivals + head);
        if (*arrived == n_splits - 1) arrivals[head] = 0;
        device_fence();
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (*arrived != n_splits - 1) return;
    // The weight of every split's accumulator in the whole, a warp a query head.
    __local float* weights = (__local float*)warp_acc;
    for (int g = warp; g < GROUP_SIZE; g += WARPS) {
        __global const float* ml = part_ml + (size_t)(head * GROUP_SIZE + g) * N_SPLITS * 2;
        float top = -INFINITY, whole = 0.0f;
        for (int i = lane; i < n_splits; i += WARP) top = fmax(top, load_shared_float(ml + 2 * i));
        top = warp_max(top);
        for (int i = lane; i < n_splits; i += WARP) {
            const float weight = softmax_weight(load_shared_float(ml + 2 * i), top);
            weights[g * N_SPLITS + i] = weight;
            whole += weight * load_shared_float(ml + 2 * i + 1);
        }
        const float norm = softmax_norm(warp_sum(whole));
        for (int i = lane; i < n_splits; i += WARP) weights[g * N_SPLITS + i] *= norm;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = lid; i < GROUP_SIZE * HEAD_DIM; i += LOCAL_SIZE) {
        const int g = i / HEAD_DIM, column = i % HEAD_DIM;
        __global const float* acc_of = part_acc + (size_t)(head * GROUP_SIZE + g) * N_SPLITS * HEAD_DIM + column;
        float sum = 0.0f;
#pragma unroll 16
        for (int split_of = 0; split_of < n_splits; ++split_of)
            sum += weights[g * N_SPLITS + split_of] * load_shared_float(acc_of + split_of * HEAD_DIM);
        out[(head * GROUP_SIZE + g) * HEAD_DIM + column] = sum;
    }
}

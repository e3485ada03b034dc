// Decode attention on NVIDIA GPUs: rotates the new token's queries and key, appends key and value, attends to the cache.
// Formula, arguments and the split of the keys as in cpu/attention_decode.cl.
//
// Index space: groups (N_KV_HEADS, N_SPLITS) of WARPS warps. The warps of a group take the split's keys in runs of 32 by
// turns, each with an online-softmax state of its own, so that no barrier stands in the loop:
//   scores: lane i owns key i of the run, for all GROUP_SIZE query heads; 16 neighbours read 16 neighbouring keys
//   values: lane i owns columns COLUMNS i .. COLUMNS i + COLUMNS - 1 of every value of the run
// At the end the group merges its warps' states, and `attention_merge` those of the splits.
//
// Build: KV (f16 or bf16), HEAD_DIM (64, 128 or 256), N_Q_HEADS, N_KV_HEADS, GROUP_SIZE, CAPACITY (a multiple of 32),
// N_SPLITS, SCALE, WARPS. Local memory: 4 GROUP_SIZE (HEAD_DIM + WARPS (HEAD_DIM + 34)) bytes.
// For pages of keys and values see kv_address.cl.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(GROUP_SIZE) || \
    !defined(CAPACITY) || !defined(N_SPLITS) || !defined(SCALE) || !defined(WARPS) || !defined(STATE_POSITION)
#error "nvidia/attention_decode.cl needs the build constants KV, HEAD_DIM, N_Q_HEADS, N_KV_HEADS, GROUP_SIZE, CAPACITY, N_SPLITS, SCALE, WARPS and those of the step state"
#endif
#include "common.cl"
#include "nvidia/ptx.cl"
#include "online_softmax.cl"
#include "attention_mods.cl"
#include "rope_row.cl"
#include "kv_address.cl"

#define COLUMNS (HEAD_DIM / WARP)
#define LOCAL_SIZE (WARP * WARPS)
#define VALUES_AT_ONCE 8  // rows of V in flight

#if COLUMNS == 2
typedef uint value_words;
#elif COLUMNS == 4
typedef uint2 value_words;
#elif COLUMNS == 8
typedef uint4 value_words;
#else
#error "nvidia/attention_decode.cl: HEAD_DIM is 64, 128 or 256"
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void attention_decode(__global const float* qkv, __global const float* rope, __global const int* state,
                      __global CAT(KV, _t)* k_cache, __global CAT(KV, _t)* v_cache,
                      __global float* part_ml, __global float* part_acc MOD_PARAMS) {
    __local float q[HEAD_DIM][GROUP_SIZE];
    __local float p[WARPS][WARP][GROUP_SIZE];
    __local float warp_m[WARPS][GROUP_SIZE], warp_l[WARPS][GROUP_SIZE], warp_acc[WARPS][GROUP_SIZE][HEAD_DIM];
    const int lid = get_local_id(0), lane = lid % WARP, warp = lid / WARP;
    const int head = get_group_id(0), split = get_group_id(1);
    const int position = state[STATE_POSITION], kv_len = position + 1;
    const int per_split = (kv_len + N_SPLITS * WARP - 1) / (N_SPLITS * WARP) * WARP;
    const int first = split * per_split, end = min(kv_len, first + per_split);
    k_cache += (size_t)head * CAPACITY * HEAD_DIM;
    v_cache += (size_t)head * CAPACITY * HEAD_DIM;

    if (first <= position && position < end) {
        __global const float* k = qkv + (N_Q_HEADS + head) * HEAD_DIM;
        __global const float* v = k + N_KV_HEADS * HEAD_DIM;
        const int row = kv_row(state, position);
        __global CAT(KV, _t)* k_new = k_cache + (size_t)(row / 16) * HEAD_DIM * 16 + row % 16;
        __global CAT(KV, _t)* v_new = v_cache + (size_t)row * HEAD_DIM;
        for (int i = lid; i < HEAD_DIM; i += LOCAL_SIZE) {
            CAT(store1_, KV)(rope_element(k, rope, i), k_new + i * 16);
            CAT(store1_, KV)(v[i], v_new + i);
        }
    }
    if (first < end)
        for (int i = lid; i < GROUP_SIZE * HEAD_DIM; i += LOCAL_SIZE)
            q[i % HEAD_DIM][i / HEAD_DIM] =
                rope_element(qkv + (head * GROUP_SIZE + i / HEAD_DIM) * HEAD_DIM, rope, i % HEAD_DIM) * SCALE;
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);

    float m[GROUP_SIZE], l[GROUP_SIZE], acc[GROUP_SIZE][COLUMNS];  // l: of the lane's keys only
#pragma unroll
    for (int g = 0; g < GROUP_SIZE; ++g) {
        m[g] = -INFINITY;
        l[g] = 0.0f;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) acc[g][c] = 0.0f;
    }
    for (int j = first + warp * WARP; j < end; j += LOCAL_SIZE) {
        const int n_keys = min(WARP, end - j), row = kv_row(state, j);
        const int key_row = row + min(lane, n_keys - 1);
        __global const CAT(KV, _t)* k = k_cache + (size_t)(key_row / 16) * HEAD_DIM * 16 + key_row % 16;
        float s[GROUP_SIZE];
#pragma unroll
        for (int g = 0; g < GROUP_SIZE; ++g) s[g] = 0.0f;
#pragma unroll 16
        for (int d = 0; d < HEAD_DIM; ++d) {
            const float value = CAT(load1_, KV)(k + d * 16);
#pragma unroll
            for (int g = 0; g < GROUP_SIZE; ++g) s[g] += q[d][g] * value;
        }
#pragma unroll
        for (int g = 0; g < GROUP_SIZE; ++g) {
            const int query_head = head * GROUP_SIZE + g;
#if HAS_SCORE_MOD
            s[g] = score_mod(s[g], 0, query_head, position, j + lane MOD_ARGS);
#endif
            bool seen = lane < n_keys;
#if HAS_MASK_MOD
            seen = seen && mask_mod(0, query_head, position, j + lane MOD_ARGS);
#endif
            if (!seen) s[g] = -INFINITY;
            const float top = fmax(m[g], warp_max(s[g]));
            const float e = softmax_weight(s[g], top), shrink = softmax_weight(m[g], top);
            p[warp][lane][g] = e;
            l[g] = l[g] * shrink + e;
            m[g] = top;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) acc[g][c] *= shrink;
        }
        warp_sync();
        __global const CAT(KV, _t)* v = v_cache + (size_t)row * HEAD_DIM + lane * COLUMNS;
        for (int i = 0; i < n_keys; i += VALUES_AT_ONCE) {
            value_words words[VALUES_AT_ONCE];
#pragma unroll
            for (int u = 0; u < VALUES_AT_ONCE; ++u)
                words[u] = *(__global const value_words*)(v + (size_t)min(i + u, n_keys - 1) * HEAD_DIM);
#pragma unroll
            for (int u = 0; u < VALUES_AT_ONCE; ++u) {
                const uint* pairs = (const uint*)&words[u];
#pragma unroll
                for (int c = 0; c < COLUMNS / 2; ++c) {
                    const float2 value = CAT(widen_, KV)(pairs[c]);
#pragma unroll
                    for (int g = 0; g < GROUP_SIZE; ++g) {
                        const float e = p[warp][i + u][g];  // 0 past the last key: its lane saw none
                        acc[g][2 * c] += e * value.x;
                        acc[g][2 * c + 1] += e * value.y;
                    }
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
    for (int i = lid; i < GROUP_SIZE * HEAD_DIM; i += LOCAL_SIZE) {
        const int g = i / HEAD_DIM, column = i % HEAD_DIM;
        float top = -INFINITY, whole = 0.0f, sum = 0.0f;
        for (int w = 0; w < WARPS; ++w) top = fmax(top, warp_m[w][g]);
        for (int w = 0; w < WARPS; ++w) {
            const float weight = softmax_weight(warp_m[w][g], top);
            whole += weight * warp_l[w][g];
            sum += weight * warp_acc[w][g][column];
        }
        const int part = (head * GROUP_SIZE + g) * N_SPLITS + split;
#if N_SPLITS > 1
        if (column == 0) {
            part_ml[2 * part] = top;
            part_ml[2 * part + 1] = whole;
        }
#else
        sum *= softmax_norm(whole);
#endif
        part_acc[(size_t)part * HEAD_DIM + column] = sum;
    }
}

// Decode attention on any device: rotates the new token's queries and key, appends key and value, attends to the cache.
// Formula, arguments and the split of the keys as in cpu/attention_decode.cl.
//
// Index space: groups (N_KV_HEADS, N_SPLITS) of LOCAL_SIZE = BLOCK_N work-items. In a tile of BLOCK_N keys
//   scores: work-item i owns key i, for all GROUP_SIZE query heads; neighbours read neighbouring keys (16 a tile)
//   values: work-item i owns columns i, i + LOCAL_SIZE, ...; neighbours read neighbouring columns
// Each key and value is read once for all query heads of its KV head.
//
// Build: KV, HEAD_DIM, N_Q_HEADS, N_KV_HEADS, GROUP_SIZE, CAPACITY (a multiple of BLOCK_N), N_SPLITS, SCALE,
// BLOCK_N (a power of two). Local memory: 4 GROUP_SIZE (HEAD_DIM + BLOCK_N) + 4 BLOCK_N bytes.
// For pages of keys and values see kv_address.cl.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || \
    !defined(GROUP_SIZE) || !defined(CAPACITY) || !defined(N_SPLITS) || !defined(SCALE) || !defined(BLOCK_N) || \
    !defined(STATE_POSITION)
#error "portable/attention_decode.cl needs the build constants KV, HEAD_DIM, N_Q_HEADS, N_KV_HEADS, GROUP_SIZE, CAPACITY, N_SPLITS, SCALE, BLOCK_N and those of the step state"
#endif
#include "common/append_token.cl"
#include "common/online_softmax.cl"
#include "common/attention_mods.cl"

#define COLUMNS ((HEAD_DIM + BLOCK_N - 1) / BLOCK_N)

__kernel __attribute__((reqd_work_group_size(BLOCK_N, 1, 1)))
void attention_decode(__global const float* qkv, __global const float* rope, __global const int* state,
                      __global kv_t* k_cache, __global kv_t* v_cache,
                      __global float* part_ml, __global float* part_acc MOD_PARAMS) {
    __local float q[GROUP_SIZE * HEAD_DIM];
    __local float p[GROUP_SIZE * BLOCK_N];
    __local float scratch[BLOCK_N];
    const int lid = get_local_id(0), head = get_group_id(0), split = get_group_id(1);
    const int position = state[STATE_POSITION], kv_len = position + 1;
    // The splits share what comes after the keys that mask_mod hides from the beginning on.
    const int2 query = (int2)(position);
    const int visible_from = first_visible(0, head * GROUP_SIZE, GROUP_SIZE, query, kv_len, BLOCK_N MOD_ARGS);
    const int per_split = (kv_len - visible_from + N_SPLITS * BLOCK_N - 1) / (N_SPLITS * BLOCK_N) * BLOCK_N;
    const int first = visible_from + split * per_split, end = min(kv_len, first + per_split);

    if (first <= position && position < end)
        append_token(state, qkv, rope, k_cache, v_cache, kv_row(state, position), head, 1, lid, BLOCK_N);
    k_cache += head * KV_HEAD_SIZE;
    v_cache += head * KV_HEAD_SIZE;
    for (int i = lid; i < GROUP_SIZE * HEAD_DIM; i += BLOCK_N)
        q[i] = rope_element(qkv + (head * GROUP_SIZE + i / HEAD_DIM) * HEAD_DIM, rope, i % HEAD_DIM) * SCALE;
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);

    float m[GROUP_SIZE], l[GROUP_SIZE], acc[GROUP_SIZE][COLUMNS];
    for (int g = 0; g < GROUP_SIZE; ++g) {
        m[g] = -INFINITY;
        l[g] = 0.0f;
        for (int c = 0; c < COLUMNS; ++c) acc[g][c] = 0.0f;
    }
    for (int j = first; j < end; j += BLOCK_N) {
        const int n_keys = min(BLOCK_N, end - j);
        const int seen = tile_class(0, head * GROUP_SIZE, GROUP_SIZE, query, j, j + n_keys MOD_ARGS);
        if (seen == TILE_EMPTY) continue;
        // Work-items past the last key repeat it: computed, then discarded. (Reading half precision in a branch that
        // not all work-items take gives wrong values with Intel's CPU compiler.)
        const int key = j + min(lid, n_keys - 1);
        const int row = kv_row(state, j);
        __global const kv_t* k = KV_TILES_AT(k_cache, row);
        __global const kv_t* v = KV_TILES_AT(v_cache, row);
        float s[GROUP_SIZE];
        for (int g = 0; g < GROUP_SIZE; ++g) s[g] = 0.0f;
#pragma unroll 4  // where all of it is, AMD's compiler asks for every key at once and spills registers
        for (int d = 0; d < HEAD_DIM; d += 4) {
            const float4 value = key4_at(k, key - j, d);
            for (int g = 0; g < GROUP_SIZE; ++g) s[g] += dot(vload4(0, q + g * HEAD_DIM + d), value);
        }
#if HAS_SCORE_MOD
        for (int g = 0; g < GROUP_SIZE; ++g) s[g] = score_mod(s[g], 0, head * GROUP_SIZE + g, position, key MOD_ARGS);
#endif
#if HAS_MASK_MOD
        for (int g = 0; g < GROUP_SIZE; ++g)
            if (seen == TILE_PARTIAL && !mask_mod(0, head * GROUP_SIZE + g, position, key MOD_ARGS)) s[g] = -INFINITY;
#endif
        for (int g = 0; g < GROUP_SIZE; ++g) {
            if (lid >= n_keys) s[g] = -INFINITY;
            scratch[lid] = s[g];
            for (int width = BLOCK_N / 2; width > 0; width /= 2) {
                barrier(CLK_LOCAL_MEM_FENCE);
                if (lid < width) scratch[lid] = fmax(scratch[lid], scratch[lid + width]);
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            const float top = fmax(m[g], scratch[0]);
            barrier(CLK_LOCAL_MEM_FENCE);
            const float e = softmax_weight(s[g], top);
            const float shrink = softmax_weight(m[g], top);
            p[g * BLOCK_N + lid] = e;
            scratch[lid] = e;
            for (int width = BLOCK_N / 2; width > 0; width /= 2) {
                barrier(CLK_LOCAL_MEM_FENCE);
                if (lid < width) scratch[lid] += scratch[lid + width];
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            l[g] = l[g] * shrink + scratch[0];
            m[g] = top;
            for (int c = 0; c < COLUMNS; ++c) acc[g][c] *= shrink;
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        for (int i = 0; i < n_keys; ++i) {
            for (int c = 0; c < COLUMNS; ++c) {
                const int column = lid + c * BLOCK_N;
                if (column >= HEAD_DIM) continue;
                const float value = value_at(v, i, column);
                for (int g = 0; g < GROUP_SIZE; ++g) acc[g][c] += p[g * BLOCK_N + i] * value;
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    for (int g = 0; g < GROUP_SIZE; ++g) {
        const int part = (head * GROUP_SIZE + g) * N_SPLITS + split;
        float norm = 1.0f;
#if N_SPLITS > 1
        if (lid == 0) {
            part_ml[2 * part] = m[g];
            part_ml[2 * part + 1] = l[g];
        }
#else
        norm = softmax_norm(l[g]);
#endif
        for (int c = 0; c < COLUMNS; ++c) {
            const int column = lid + c * BLOCK_N;
            if (column < HEAD_DIM && l[g] > 0.0f) part_acc[(size_t)part * HEAD_DIM + column] = acc[g][c] * norm;
        }
    }
}

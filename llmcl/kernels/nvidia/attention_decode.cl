// Decode attention on NVIDIA GPUs: rotates the new token's queries and key, appends key and value, attends to the cache. Formula,
// arguments and key splits as in cpu/attention_decode.cl; build constants as in nvidia/attend.cl, which does the work. A head's
// last group to finish merges the split states. This saves a launch of attention_merge.cl.
//
// out       see store_attended.cl
// arrivals  int [N_KV_HEADS], 0 before and after: groups per head that have left their state
// sinks     float [N_Q_HEADS], with HAS_SINKS: see online_softmax.cl
//
// Index space: groups (N_KV_HEADS, N_SPLITS, rows of the step: step_rows.cl) with WARPS warps. For pages of keys and values see
// kv_address.cl.
#include "nvidia/attend.cl"
#include "common/step_rows.cl"
#include "nvidia/store_attended.cl"

#define UNIT_FLOATS MAX(WARPS * WARP_FLOATS, (2 * (N_SPLITS + HAS_SINKS) * GROUP_SIZE + 3) / 4 * 4)
#define MEMORY_FLOATS (QUERY_FLOATS + UNIT_FLOATS + NEW_FLOATS + 4)

// The work of a group: a head, a split and a row of the step. memory: MEMORY_FLOATS. With CHAINED the group waits until `done`
// equals `count` before it reads other groups' results; count 0: no wait.
inline void attention_unit(const int head, const int split, const int row, __local uint4* memory,
                           volatile __global const uint* done, const uint count, __global const float* qkv,
                           __global const float* rope, __global const int* state, __global CAT(KV, _t)* k_cache,
                           __global CAT(KV, _t)* v_cache, __global float* part_ml, __global float* part_acc,
                           __global void* out, __global int* arrivals SINKS_PARAM MOD_PARAMS) {
    __local float* queries = (__local float*)memory;
    __local float* warps = queries + QUERY_FLOATS;
    __local float* new_rows = warps + UNIT_FLOATS;
    __local int* arrived = (__local int*)(new_rows + NEW_FLOATS);
    const int lid = get_local_id(0);
#if CHAINED
    if (row >= state[STATE_N_TOKENS]) return;  // the launch has groups for the maximum row count
#endif
    state = sequence_state(state, row);
    qkv += row * (N_Q_HEADS + 2 * N_KV_HEADS) * HEAD_DIM;
    rope += row * HEAD_DIM;
    part_ml += row * N_Q_HEADS * N_SPLITS * 2;
    part_acc += (size_t)row * N_Q_HEADS * N_SPLITS * HEAD_DIM;
    arrivals += row * N_KV_HEADS;
    const kv_split range = split_of_keys(head, split, state MOD_ARGS);
    const int n_splits = range.n_splits;
    if (split >= n_splits) return;
    attend_space space = {queries, new_rows, warps, WARP_FLOATS};
#if CHAINED
    space.done = done;
    space.count = count;
#endif
    attend(&range, qkv, 0, false, rope, state, k_cache, v_cache, 0, &space MOD_ARGS);
    for (int i = lid; i < GROUP_SIZE * HEAD_DIM; i += LOCAL_SIZE) {
        const softmax_state all = warps_state(&range, i, &space);
        if (n_splits == 1) {
            const float norm = OUTPUT_NORM(all.m, all.l, head * GROUP_SIZE + i / HEAD_DIM);
            store_attended(out, row, head * GROUP_SIZE * HEAD_DIM + i, all.acc * norm);
            continue;
        }
        const int part = (head * GROUP_SIZE + i / HEAD_DIM) * N_SPLITS + split;
        if (i % HEAD_DIM == 0) {
            part_ml[2 * part] = all.m;
            part_ml[2 * part + 1] = all.l;
        }
        part_acc[(size_t)part * HEAD_DIM + i % HEAD_DIM] = all.acc;
    }
    if (n_splits == 1) return;
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (lid == 0) {  // the fences cover everything that the barriers order
        device_fence();
        *arrived = atomic_inc(arrivals + head);
        if (*arrived == n_splits - 1) arrivals[head] = 0;
        device_fence();
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (*arrived != n_splits - 1) return;
    __local float* ml = warps;
    for (int i = lid; i < n_splits * GROUP_SIZE * 2; i += LOCAL_SIZE) {
        const int k = i / 2 / GROUP_SIZE, g = i / 2 % GROUP_SIZE;
        ml[i] = load_shared_float(part_ml + ((head * GROUP_SIZE + g) * N_SPLITS + k) * 2 + i % 2);
    }
#if HAS_SINKS
    for (int i = lid; i < GROUP_SIZE * 2; i += LOCAL_SIZE)  // with sinks, an extra state without an accumulator
        ml[n_splits * GROUP_SIZE * 2 + i] = i % 2 ? 1.0f : sinks[head * GROUP_SIZE + i / 2];
#endif
    barrier(CLK_LOCAL_MEM_FENCE);
    weigh_splits(ml, n_splits + HAS_SINKS);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = lid; i < GROUP_SIZE * HEAD_DIM; i += LOCAL_SIZE) {
        const int g = i / HEAD_DIM, column = i % HEAD_DIM;
        __global const float* acc_of = part_acc + (size_t)(head * GROUP_SIZE + g) * N_SPLITS * HEAD_DIM + column;
        float sum = 0.0f;
#pragma unroll 16
        for (int k = 0; k < n_splits; ++k) sum += ml[(k * GROUP_SIZE + g) * 2] * load_shared_float(acc_of + k * HEAD_DIM);
        store_attended(out, row, (head * GROUP_SIZE + g) * HEAD_DIM + column, sum);
    }
}

#if !CHAINED
__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void attention_decode(__global const float* qkv, __global const float* rope, __global const int* state,
                      __global CAT(KV, _t)* k_cache, __global CAT(KV, _t)* v_cache,
                      __global float* part_ml, __global float* part_acc, __global void* out,
                      __global int* arrivals SINKS_PARAM MOD_PARAMS) {
    __local uint4 __attribute__((aligned(16))) memory[MEMORY_FLOATS / 4];
    attention_unit(get_group_id(0), get_group_id(1), step_row(2), memory, 0, 0, qkv, rope, state, k_cache, v_cache, part_ml,
                   part_acc, out, arrivals SINKS_ARG MOD_ARGS);
}
#endif

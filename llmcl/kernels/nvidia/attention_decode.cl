// Decode attention on NVIDIA GPUs: rotates the new token's queries and key, appends key and value, attends to the cache.
// Formula, arguments and the split of the keys as in cpu/attention_decode.cl; `out`, `arrivals`, build constants and local
// memory as in nvidia/attend.cl, which does the work.
//
// Index space: groups (N_KV_HEADS, N_SPLITS) of WARPS warps. For pages of keys and values see kv_address.cl.
#include "nvidia/attend.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void attention_decode(__global const float* qkv, __global const float* rope, __global const int* state,
                      __global CAT(KV, _t)* k_cache, __global CAT(KV, _t)* v_cache,
                      __global float* part_ml, __global float* part_acc, __global float* out,
                      __global int* arrivals MOD_PARAMS) {
    __local float scratch[ATTEND_FLOATS];
    __local int arrived;
    attend(get_group_id(0), get_group_id(1), state[STATE_POSITION], qkv, rope, state, k_cache, v_cache, part_ml, part_acc, out,
           arrivals, scratch, &arrived MOD_ARGS);
}

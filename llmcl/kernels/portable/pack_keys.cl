// Packs a key array into the cache's tiles, for attention on arrays. Arguments as in cpu/pack_keys.cl.
//
// A work-item moves one value; neighbours write neighbours. Columns past the last key repeat the last key.
// Index space: groups (HEAD_DIM, ceil(n_keys / 16), heads), local size (16, 1, 1). Build: KV (f32, f16 or bf16), HEAD_DIM.
#if !defined(KV) || !defined(HEAD_DIM)
#error "portable/pack_keys.cl needs the build constants KV, HEAD_DIM"
#endif
#include "common/common.cl"

__kernel __attribute__((reqd_work_group_size(16, 1, 1)))
void pack_keys(__global const CAT(KV, _t)* keys, __global CAT(KV, _t)* tiles, const int n_keys, const int capacity) {
    const int lane = get_local_id(0), d = get_group_id(0), tile = get_group_id(1), head = get_group_id(2);
    tiles[(((size_t)head * capacity / 16 + tile) * HEAD_DIM + d) * 16 + lane] =
        keys[((size_t)head * n_keys + min(tile * 16 + lane, n_keys - 1)) * HEAD_DIM + d];
}

// Keys and values as arrays -> the layout of the cache, for attention on arrays.
//
// k, v     float [batch][n_keys][N_KV_HEADS][HEAD_DIM]
// k_cache  KV [batch][N_KV_HEADS][CAPACITY/16][HEAD_DIM][16]      v_cache  KV [batch][N_KV_HEADS][CAPACITY][HEAD_DIM]
// Index space: (N_KV_HEADS, n_keys, batch), any local size. Build: KV, N_KV_HEADS, HEAD_DIM, CAPACITY (a multiple of 16).
#if !defined(KV) || !defined(N_KV_HEADS) || !defined(HEAD_DIM) || !defined(CAPACITY)
#error "pack_kv.cl needs the build constants KV, N_KV_HEADS, HEAD_DIM, CAPACITY"
#endif
#include "common.cl"

__kernel void pack_kv(__global const float* k, __global const float* v, __global const int* state,
                      __global CAT(KV, _t)* k_cache, __global CAT(KV, _t)* v_cache) {
    const int head = get_global_id(0), key = get_global_id(1), batch = get_global_id(2);
    const size_t row = (((size_t)batch * get_global_size(1) + key) * N_KV_HEADS + head) * HEAD_DIM;
    const size_t cache = ((size_t)batch * N_KV_HEADS + head) * CAPACITY * HEAD_DIM;
    k_cache += cache + (size_t)(key / 16) * HEAD_DIM * 16 + key % 16;
    v_cache += cache + (size_t)key * HEAD_DIM;
    for (int i = 0; i < HEAD_DIM; ++i) {
        CAT(store1_, KV)(k[row + i], k_cache + i * 16);
        CAT(store1_, KV)(v[row + i], v_cache + i);
    }
}

// Appends a token's rotated keys and its values to `row` of the cache, for n_heads KV heads beginning with `head`. The work is
// divided into runs of KV_RUN dimensions; work-item lid takes every size-th run.
//
// qkv  float [N_Q_HEADS + 2 N_KV_HEADS][HEAD_DIM] of the token      k_cache, v_cache  beginning of head 0
#define EACH_OF_RUN(j) _Pragma("unroll") for (int j = 0; j < KV_RUN; ++j)
#include "common/kv_cache.cl"
#include "common/qkv_row.cl"
#include "common/rope_row.cl"

inline void append_token(__global const int* state, __global const float* qkv, __global const float* rope,
                         __global kv_t* k_cache, __global kv_t* v_cache, const int row, const int head,
                         const int n_heads, const int lid, const int size) {
    const size_t head_size = KV_HEAD_SIZE;
    for (int run = lid; run < n_heads * (HEAD_DIM / KV_RUN); run += size) {
        const int h = head + run / (HEAD_DIM / KV_RUN), d = run % (HEAD_DIM / KV_RUN) * KV_RUN;
        __global const float* k = qkv + (N_Q_HEADS + h) * HEAD_DIM;
        __global const float* v = k + N_KV_HEADS * HEAD_DIM;
        float x[KV_RUN];
        EACH_OF_RUN(j) x[j] = rope_element(k, rope, d + j);
        store_key(KV_TILES_AT(k_cache + h * head_size, row), row % 16, d, x);
        EACH_OF_RUN(j) x[j] = v[d + j];
        store_value(KV_TILES_AT(v_cache + h * head_size, row), row % 16, d, x);
    }
}

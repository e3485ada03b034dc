// Widens a layer's q8_0 keys and values to float16, in the layout of a float16 cache (common/kv_cache.cl), for a step's prefill attention.
//
// k_cache, v_cache  KV (q8_0), N_KV_HEADS heads, contiguous or in pages
// keys      f16 [N_KV_HEADS][COPY_ROWS/16][HEAD_DIM][16]
// values    f16 [N_KV_HEADS][COPY_ROWS][HEAD_DIM]
//
// With several sequences (step_rows.cl) keys and values keep their row positions in the cache's pages.
//
// Index space: groups (N_KV_HEADS, any number of parts) with 256 work-items; the parts take tiles of 16 keys in turn. With several
// sequences a further dimension counts the step's runs.
// Build: KV, N_KV_HEADS, HEAD_DIM, CAPACITY, COPY_ROWS (most keys in a text or in the cache), step state constants.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(CAPACITY) || !defined(COPY_ROWS) || !defined(STATE_POSITION) || \
    !defined(STATE_N_TOKENS)
#error "nvidia/widen_cache.cl needs the build constants KV, HEAD_DIM, CAPACITY, COPY_ROWS and those of the step state"
#endif
#include "common/kv_cache.cl"
#include "common/step_rows.cl"
#include "nvidia/ptx.cl"

#define PIECES (HEAD_DIM / 4)  // of 4 dimensions

__kernel __attribute__((reqd_work_group_size(256, 1, 1)))
void widen_cache(__global const int* state, __global const kv_t* k_cache, __global const kv_t* v_cache, __global ushort* keys,
                 __global ushort* values) {
    const int head = get_group_id(0), lid = get_local_id(0);
#ifdef STATE_PIECES
    const int4 piece = piece_at(state, get_group_id(2));
    const int end = piece.w + piece.z;
    state = sequence_at(state, piece.x);
#define COPY_ROW row
#else
    const int end = state[STATE_POSITION] + state[STATE_N_TOKENS];
#define COPY_ROW j
#endif
    k_cache += head * KV_HEAD_SIZE;
    v_cache += head * KV_HEAD_SIZE;
    for (int j = 16 * get_group_id(1); j < end; j += 16 * get_num_groups(1)) {
        const int row = kv_row(state, j);
        __global const kv_t* k = KV_TILES_AT(k_cache, row);
        __global const kv_t* v = KV_TILES_AT(v_cache, row);
        const size_t tile = ((size_t)head * COPY_ROWS + COPY_ROW) * HEAD_DIM;
        for (int at = lid; at < 16 * PIECES; at += 256) {
            // Neighbouring work-items have neighbouring keys, and neighbouring dimensions of a value.
            const int key = at % 16, dim = at / 16 * 4, i = at / PIECES, d = at % PIECES * 4;
            const float4 x = key4_at(k, key, dim);
            const uint first = narrow_f16(x.x, x.y), second = narrow_f16(x.z, x.w);
            __global ushort* to = keys + tile + dim * 16 + key;
            to[0] = (ushort)first;
            to[16] = (ushort)(first >> 16);
            to[32] = (ushort)second;
            to[48] = (ushort)(second >> 16);
            const float scale = kv_scale(v, d / 32 * 16 + i);
            const float4 y = convert_float4(vload4(0, (__global const char*)v + 32 * KV_GROUPS + i * HEAD_DIM + d)) * scale;
            *(__global uint2*)(values + tile + i * HEAD_DIM + d) = (uint2)(narrow_f16(y.x, y.y), narrow_f16(y.z, y.w));
        }
    }
}

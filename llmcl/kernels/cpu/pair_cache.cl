// Rounds a layer's keys and values to bfloat16 pairs, in the format cpu/paired_tile.cl takes for a step's tokens.
//
// k_cache, v_cache  KV (f16, bf16 or q8_0), N_KV_HEADS heads, contiguous or in pages: see kv_cache.cl
// keys      bfloat16 [N_KV_HEADS][COPY_ROWS/16][HEAD_DIM/2][16][2]     a lane has two neighbouring dimensions of its key
// values    bfloat16 [N_KV_HEADS][COPY_ROWS/2][HEAD_DIM][2]            a lane has its column for two neighbouring keys
//
// Rounds to nearest, ties to even. Missing keys have values of 0.
//
// With several sequences (step_rows.cl) keys and values keep their row positions in the cache's pages.
//
// Index space: (N_KV_HEADS, any number of parts), local size 1; the parts take 16-key tiles in turn. With several sequences a further
// dimension counts the step's runs.
// Build: KV, N_KV_HEADS, HEAD_DIM, CAPACITY, COPY_ROWS (most keys in a text or in the cache: a multiple of 64), step state constants.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(CAPACITY) || !defined(COPY_ROWS) || !defined(STATE_POSITION) || \
    !defined(STATE_N_TOKENS)
#error "cpu/pair_cache.cl needs the build constants KV, HEAD_DIM, CAPACITY, COPY_ROWS and those of the step state"
#endif
#include "common/kv_cache.cl"
#include "common/step_rows.cl"

// Dimension d for a tile's 16 keys; 16 dimensions from c on for value i in a tile.
#if KV_QUANTIZED
typedef uint key_vector __attribute__((ext_vector_type(16), aligned(32)));  // tiles are a multiple of 32 bytes, not of 64

inline float16 load_key(__global const kv_t* tile, const int d) {
    __global const kv_t* group = tile + d / 32 * KV_GROUP_SIZE;
    const uint16 bytes = *(__global const key_vector*)(group + 32 + d % 32 / 4 * 64);
    return CONVERT16(as_int16(bytes >> (8 * (d % 4)) & 0xffu) - 128, float) * load16_f16((__global const f16_t*)group);
}
inline float16 load_value(__global const kv_t* tile, const int i, const int c) {
    const char16 numbers = *(__global const char16*)(tile + 32 * KV_GROUPS + i * HEAD_DIM + c);
    return CONVERT16(numbers, float) * kv_scale(tile, c / 32 * 16 + i);
}
#else
inline float16 load_key(__global const kv_t* tile, const int d) { return CAT(load16_, KV)(tile + d * 16); }
inline float16 load_value(__global const kv_t* tile, const int i, const int c) {
    return CAT(load16_, KV)(tile + i * HEAD_DIM + c);
}
#endif

inline uint16 pairs(const float16 first, const float16 second) {
    return round16_bf16(first) >> 16 | (round16_bf16(second) & 0xffff0000u);
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void pair_cache(__global const int* state, __global const kv_t* k_cache, __global const kv_t* v_cache,
                __global uint* keys, __global uint* values) {
    const int head = get_group_id(0);
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
        const size_t tile = ((size_t)head * COPY_ROWS + COPY_ROW) * (HEAD_DIM / 2);
        for (int d = 0; d < HEAD_DIM; d += 2)
            *(__global uint16*)(keys + tile + d * 8) = pairs(load_key(k, d), load_key(k, d + 1));
        for (int i = 0; i < 16; i += 2) {
            for (int c = 0; c < HEAD_DIM; c += 16) {
                uint16 pair = 0;
                if (j + i < end) pair = round16_bf16(load_value(v, i, c)) >> 16;
                if (j + i + 1 < end) pair |= round16_bf16(load_value(v, i + 1, c)) & 0xffff0000u;
                *(__global uint16*)(values + tile + i / 2 * HEAD_DIM + c) = pair;
            }
        }
    }
}

// Keys and values of a q8_0 cache (common/kv_cache.cl) on their way to the matrix units, for nvidia/attend.cl, whose macros and types it
// uses. Numbers become float16 in registers, exactly. A key's scale multiplies the sums of 32 dimensions; a value's multiplies its
// numbers and rounds them to float16, which adds a thousandth of q8_0's own error.
#include "common/kv_cache.cl"

typedef struct {
    uint2 numbers[VALUE_PIECES][4];
    ushort scales[VALUE_PIECES][4];
} value_tile;

// The numbers + 128 in the two bytes of `bytes` that `choice` picks (nvidia/ptx.cl). A byte in the mantissa of a half gives 1024 + byte.
inline uint widen_pair(const uint bytes, const uint choice) {
    return sub_f16x2(permute(bytes, 0x64646464, choice), 0x64806480);
}
#define LOWER_PAIR 0x4140
#define UPPER_PAIR 0x4342

inline __global const kv_t* tile_at(__global const kv_t* cache, const kv_split* s, __global const int* state, const int j) {
    return KV_TILES_AT(cache, s->row + kv_row(state, j));
}

#define TILE_SLOTS (OWN_DIMS / 32 * KV_GROUP_SIZE / 16)  // of 16 bytes, in a warp's part of a tile

// Starts the copy of a tile's keys, if the tile exists, into the warps' memory, which must be free: bytes as they are stored.
inline void copy_keys(__local float* own, const kv_split* s, __global const int* state, __global const kv_t* k_cache, const int j,
                      const int lane) {
    if (j < s->end) {
        const int first = PART_OF_TILE * TILE_SLOTS;
        __global const kv_t* k = tile_at(k_cache, s, state, j) + first * 16;
        const uint to = local_address(own) + first * 16;
#pragma unroll
        for (int i = 0; i < TILE_SLOTS; i += WARP)
            if (i + lane < TILE_SLOTS) copy16_async(to + (i + lane) * 16, k + (i + lane) * 16, true);
    }
    copy_commit();
}

// The place of a query's dimension in a fragment: a lane has 4 neighbouring dimensions of its keys, as a word holds them.
#define QUERY_PAIR(dim) ((dim) % 16 / 4)
#define QUERY_HALF(dim) ((dim) % 4)

// Multiplies the warp's tile by each quad's queries: sums for keys g (x, y) and g + 8 (z, w).
inline void multiply_keys(float4 sums[QUADS], __local const float* own, __local const float* queries, const int lane) {
    __local const uint2(*q)[STEPS][WARP] = (__local const uint2(*)[STEPS][WARP])queries;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) sums[quad] = (float4)(0.0f);
#pragma unroll
    for (int i = 0; i < KV_GROUPS; ++i) {
        __local const uchar* group = (__local const uchar*)own + i * KV_GROUP_SIZE;
        __local const uint* words = (__local const uint*)(group + 32) + t * 16 + g;
        float4 products[QUADS];
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) products[quad] = (float4)(0.0f);
#pragma unroll
        for (int half_group = 0; half_group < 2; ++half_group) {
            const uint lower = words[half_group * 64], upper = words[half_group * 64 + 8];
            const uint4 keys = {widen_pair(lower, LOWER_PAIR), widen_pair(upper, LOWER_PAIR), widen_pair(lower, UPPER_PAIR),
                                widen_pair(upper, UPPER_PAIR)};
#pragma unroll
            for (int quad = 0; quad < QUADS; ++quad) {
                const uint2 queries = q[quad][2 * i + half_group][lane];
                mma_f16(&products[quad], keys, queries.x, queries.y);
            }
        }
        const float2 scales = widen_f16(((__local const ushort*)group)[g] | (uint)((__local const ushort*)group)[g + 8] << 16);
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad)
            sums[quad] += products[quad] * (float4)(scales.x, scales.x, scales.y, scales.y);
    }
}

// Loads pieces `piece` to before `end_piece`.
inline void load_values(value_tile* values, const kv_split* s, __global const int* state,
                        __global const kv_t* v_cache, const int j, const int lane, const int piece, const int end_piece) {
    if (j >= s->end) return;
    const int last = s->end - 1 - j;  // a key past the end has weight 0, but memory may hold NaN there
    __global const kv_t* tile = tile_at(v_cache, s, state, j);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int key = min(VALUE_KEY(lane, i), last);
#pragma unroll
        for (int h = piece; h < end_piece; ++h) {
            const int dim = PART_OF_TILE * OWN_DIMS + h * 64 + lane / 4 * 8;
            values->numbers[h % VALUE_PIECES][i] = load8_words(tile + 32 * KV_GROUPS + key * HEAD_DIM + dim);
            values->scales[h % VALUE_PIECES][i] = ((__global const ushort*)tile)[dim / 32 * 16 + key];
        }
    }
}

// Returns the 8 dimensions of the lane's i-th key in a piece, in float16.
inline uint4 value_words(const value_tile* values, const int piece, const int i) {
    const uint2 bytes = values->numbers[piece][i] ^ 0x80808080u;
    const uint scales = values->scales[piece][i] * 0x10001u;
    return (uint4)(mul_f16x2(widen_pair(bytes.x, LOWER_PAIR), scales), mul_f16x2(widen_pair(bytes.x, UPPER_PAIR), scales),
                   mul_f16x2(widen_pair(bytes.y, LOWER_PAIR), scales), mul_f16x2(widen_pair(bytes.y, UPPER_PAIR), scales));
}

// Prefetches a tile's values into the L2 cache.
inline void fetch_values(const kv_split* s, __global const int* state, __global const kv_t* v_cache, const int j, const int lane) {
    if (j >= s->end) return;
    __global const kv_t* tile = tile_at(v_cache, s, state, j);
    for (int i = PART_OF_TILE * WARP + lane; i < (KV_TILE + 127) / 128; i += TILE_WARPS * WARP) fetch_line(tile + i * 128);
}

// The tiles with the new position's key and value, and the position's place in them.
typedef struct {
    __global kv_t* keys;
    __global kv_t* values;
    int place;
} new_place;

inline new_place place_of_new(__global kv_t* k_cache, __global kv_t* v_cache, const size_t row) {
    const new_place to = {KV_TILES_AT(k_cache, row), KV_TILES_AT(v_cache, row), row % 16};
    return to;
}

// Stores elements `column` and `column` + HEAD_DIM / 2 of the new key or value in new_rows, for quantize_new.
inline void put_new_pair(const new_place* to, __local float* new_rows, const bool is_key, const int column, const float2 v) {
    __local float* row = new_rows + (is_key ? 0 : HEAD_DIM);
    row[column] = v.x;
    row[column + HEAD_DIM / 2] = v.y;
}

// Appends the new key and value: a warp takes a group of 32 dimensions. Rounds as kv_cache.cl does.
inline void quantize_new(const new_place* to, __local const float* new_rows, const int lid) {
    const int lane = lid % WARP;
    for (int group = lid / WARP; group < 2 * KV_GROUPS; group += WARPS) {
        const float x = new_rows[group * 32 + lane];
        const float scale = as_float(warp_max_uint(as_uint(x) & 0x7fffffffu)) / 127.0f;
        const int number = round_number(x * (scale > 0.0f ? 1.0f / scale : 0.0f));
        if (group < KV_GROUPS) {
            __global kv_t* keys = to->keys + group * KV_GROUP_SIZE;
            if (lane == 0) store1_f16(scale, (__global f16_t*)keys + to->place);
            keys[32 + lane / 4 * 64 + to->place * 4 + lane % 4] = (uchar)(number + 128);
        } else {
            const int i = group - KV_GROUPS;
            if (lane == 0) store1_f16(scale, (__global f16_t*)to->values + i * 16 + to->place);
            to->values[32 * KV_GROUPS + to->place * HEAD_DIM + i * 32 + lane] = as_uchar((char)number);
        }
    }
}

// Copies the new key, which quantize_new has appended, to its place in a tile whose other keys are in memory or on the way.
inline void put_key(__local float* own, const new_place* to, __local const float* new_rows, const int place, const int lane) {
    COPY_WAIT(0);
    tile_sync();
    for (int i = PART_OF_TILE * WARP + lane; i < HEAD_DIM / 4; i += TILE_WARPS * WARP) {
        const int at = i / 8 * (KV_GROUP_SIZE / 4) + 8 + i % 8 * 16 + place;  // 4 dimensions in a word
        ((__local uint*)own)[at] = load4_words((__global const uint*)to->keys + at);
    }
    if (lane < KV_GROUPS) {
        const int at = lane * (KV_GROUP_SIZE / 2) + place;
        ((__local ushort*)own)[at] = ((volatile __global const ushort*)to->keys)[at];
    }
}

// Keys and values of a 16-bit cache (common/kv_cache.cl) on their way to the matrix units, for nvidia/attend.cl, whose macros and types
// it uses. nvidia/kv_tiles_q8_0.cl has the same functions for q8_0.
typedef struct {
    uint4 of[VALUE_PIECES][4];
} value_tile;

// Starts the copy of a tile's keys, if the tile exists, into the warps' memory, which must be free. The two halves of a dimension's
// 16 keys are swapped where they would share banks with the dimension four before.
inline void copy_keys(__local float* own, const kv_split* s, __global const int* state,
                      __global const CAT(KV, _t)* k_cache, const int j, const int lane) {
    if (j < s->end) {
        __global const CAT(KV, _t)* k = k_cache + (s->row + kv_row(state, j)) * HEAD_DIM + lane * 8;
        const uint to = local_address(own) + (lane ^ (lane / 8 & 1)) * 16;
        const int first = PART_OF_TILE * VALUE_STEPS;
#pragma unroll
        for (int i = 0; i < VALUE_STEPS; ++i) copy16_async(to + (first + i) * 512, k + (first + i) * 256, true);
    }
    copy_commit();
}

// The place of a query's dimension in a fragment: pair of the lane, and half word of the pair's four.
#define QUERY_PAIR(dim) ((dim) % 8 / 2)
#define QUERY_HALF(dim) ((dim) % 16 / 8 * 2 + (dim) % 2)

// Multiplies the warp's tile by each quad's queries: sums for keys g (x, y) and g + 8 (z, w).
inline void multiply_keys(float4 sums[QUADS], __local const float* own, __local const float* queries, const int lane) {
    __local const uint2(*q)[STEPS][WARP] = (__local const uint2(*)[STEPS][WARP])queries;
    // A lane names a row in one of four 8 x 8 matrices: 8 keys (lower or upper half) in a dimension.
    const int dim = lane % 8 + lane / 16 * 8, half_row = (lane / 8 ^ dim / 4) & 1;
    const uint keys_at = local_address(own) + dim * 32 + half_row * 16;
    float4 products[QUADS][2];
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) products[quad][0] = products[quad][1] = (float4)(0.0f);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const uint4 keys = load_matrices_transposed(keys_at + i * 512);
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
            const uint2 queries = q[quad][i][lane];
            CAT(mma_, KV)(&products[quad][i % 2], keys, queries.x, queries.y);
        }
    }
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) sums[quad] = products[quad][0] + products[quad][1];
}

// Loads pieces `piece` to before `end_piece`.
inline void load_values(value_tile* values, const kv_split* s, __global const int* state,
                        __global const CAT(KV, _t)* v_cache, const int j, const int lane, const int piece, const int end_piece) {
    if (j >= s->end) return;
    const int last = s->end - 1 - j;  // a key past the end has weight 0, but memory may hold NaN there
    __global const CAT(KV, _t)* v = v_cache + (s->row + kv_row(state, j)) * HEAD_DIM + PART_OF_TILE * OWN_DIMS + lane / 4 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int key = min(VALUE_KEY(lane, i), last);
#pragma unroll
        for (int h = piece; h < end_piece; ++h) values->of[h % VALUE_PIECES][i] = load16_words(v + key * HEAD_DIM + h * 64);
    }
}

// Returns the 8 dimensions of the lane's i-th key in a piece.
inline uint4 value_words(const value_tile* values, const int piece, const int i) { return values->of[piece][i]; }

// Prefetches a tile's values into the L2 cache.
inline void fetch_values(const kv_split* s, __global const int* state, __global const CAT(KV, _t)* v_cache, const int j,
                         const int lane) {
    if (j >= s->end) return;
    __global const CAT(KV, _t)* v = v_cache + (s->row + kv_row(state, j)) * HEAD_DIM;
    for (int i = PART_OF_TILE * WARP + lane; i < HEAD_DIM / 4; i += TILE_WARPS * WARP) fetch_line(v + i * 64);  // lines with 128 bytes
}

// The new position's key and value in the cache.
typedef struct {
    __global ushort* key;    // at a stride of 16
    __global ushort* value;
} new_place;

// Stores the new key as key `place` of a tile whose other keys are in memory or on the way.
inline void put_key(__local float* own, const new_place* to, __local const float* new_key, const int place, const int lane) {
    COPY_WAIT(0);
    tile_sync();
    for (int dim = PART_OF_TILE * WARP + lane; dim < HEAD_DIM; dim += TILE_WARPS * WARP)
        ((__local ushort*)own)[dim * 16 + (place ^ dim / 4 % 2 * 8)] = ((__local const ushort*)new_key)[dim];
}

inline new_place place_of_new(__global CAT(KV, _t)* k_cache, __global CAT(KV, _t)* v_cache, const size_t row) {
    const new_place to = {(__global ushort*)(k_cache + row / 16 * 16 * HEAD_DIM + row % 16),
                          (__global ushort*)(v_cache + row * HEAD_DIM)};
    return to;
}

// Stores elements `column` and `column` + HEAD_DIM / 2 of the new key or value in the cache, and of the key in new_key, too.
inline void put_new_pair(const new_place* to, __local float* new_key, const bool is_key, const int column, const float2 v) {
    const uint pair = CAT(narrow_, KV)(v.x, v.y);
    __global ushort* at = is_key ? to->key : to->value;
    const int step = is_key ? 16 : 1;  // between dimensions
    at[column * step] = (ushort)pair;
    at[(column + HEAD_DIM / 2) * step] = (ushort)(pair >> 16);
    if (is_key) {
        ((__local ushort*)new_key)[column] = (ushort)pair;
        ((__local ushort*)new_key)[column + HEAD_DIM / 2] = (ushort)(pair >> 16);
    }
}

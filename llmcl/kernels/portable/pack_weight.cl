// A quantised tensor's rows as a checkpoint stores them -> the device's quantised tiles (tiles.cl), number for number.
//
// source      uchar [n_rows][ROW_BYTES] of the format of the same name, a run of source rows
// tiles, flags, first_row, first_tile, n_tiles, flag: as in load_weight.cl, which says how blocks are stored
// ROPE_HEAD_DIM, TILE_STEP, TILE_OFFSET: as there; a flag is set where a scale is not finite
//
// Index space: (1 to K / 32, n_rows), any local size: the work-items of a row share its groups of 32 columns. Build:
// WEIGHT, K, ROW_BYTES, ROPE_HEAD_DIM, TILE_STEP, TILE_OFFSET.
#if !defined(WEIGHT) || !defined(K) || !defined(ROW_BYTES) || !defined(ROPE_HEAD_DIM) || !defined(TILE_STEP) || \
    !defined(TILE_OFFSET)
#error "pack_weight.cl needs the build constants WEIGHT, K, ROW_BYTES, ROPE_HEAD_DIM, TILE_STEP, TILE_OFFSET"
#endif
#include "common/tiles.cl"
#include "common/tile_row.cl"

inline uint bits_at(__global const uchar* p) { return p[0] | p[1] << 8 | p[2] << 16 | (uint)p[3] << 24; }

// The numbers of the g-th 32 columns of a row, as the tiles store them.
inline void read_quants(__global const uchar* row, int g, uchar* q) {
#if WEIGHT_IS(q8_0)
    for (int i = 0; i < 32; ++i) q[i] = row[g * 34 + 2 + i] ^ 0x80;
#elif WEIGHT_IS(q4_0) || WEIGHT_IS(q4_1) || WEIGHT_IS(q5_0) || WEIGHT_IS(q5_1)
    const int before = HAS_MIN ? 4 : 2;
    __global const uchar* block = row + g * (before + (HAS_FIFTH_BIT ? 20 : 16));
    __global const uchar* nibbles = block + before + (HAS_FIFTH_BIT ? 4 : 0);
    for (int i = 0; i < 16; ++i) {
        q[i] = nibbles[i] & 15;
        q[i + 16] = nibbles[i] >> 4;
    }
#if HAS_FIFTH_BIT
    const uint high = bits_at(block + before);
    for (int i = 0; i < 32; ++i) q[i] |= (high >> i & 1u) << 4;
#endif
#elif WEIGHT_IS(q4_k) || WEIGHT_IS(q5_k)
    __global const uchar* block = row + g / 8 * (WEIGHT_IS(q5_k) ? 176 : 144);
    __global const uchar* nibbles = block + (WEIGHT_IS(q5_k) ? 48 : 16) + g % 8 / 2 * 32;
    for (int i = 0; i < 32; ++i) {
        q[i] = g % 2 ? nibbles[i] >> 4 : nibbles[i] & 15;
        if (HAS_FIFTH_BIT) q[i] |= (block[16 + i] >> (g % 8) & 1) << 4;
    }
#else
    __global const uchar* block = row + g / 8 * 210;
    const int j = g % 4;
    __global const uchar* low = block + g % 8 / 4 * 64 + (j & 1) * 32;
    __global const uchar* high = block + 128 + g % 8 / 4 * 32;
    for (int i = 0; i < 32; ++i) q[i] = (j < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> (2 * j) & 3) << 4;
#endif
}

inline bool copy_half(__global const uchar* from, __global uchar* to) {
    to[0] = from[0];
    to[1] = from[1];
    return (from[1] & 0x7c) != 0x7c;  // the exponent of NaN and infinity
}

// The scales of group g of row r; false if one is not finite.
inline bool copy_scales(__global const uchar* row, int g, __global uchar* tile, int r) {
    __global uchar* group = tile + GROUP_AT(g);
#if IS_SUPER
    __global uchar* head = tile + g / 8 * SUPER_BYTES + 2 * r;
    const int j = g % 8;
#if WEIGHT_IS(q6_k)
    __global const uchar* block = row + g / 8 * 210;
    group[r] = block[192 + 2 * j];
    group[16 + r] = block[193 + 2 * j];
    return copy_half(block + 208, head);
#else
    __global const uchar* block = row + g / 8 * (WEIGHT_IS(q5_k) ? 176 : 144);
    __global const uchar* packed = block + 4;
    group[r] = j < 4 ? packed[j] & 63 : (packed[j + 4] & 15) | packed[j - 4] >> 6 << 4;
    group[16 + r] = j < 4 ? packed[j + 4] & 63 : packed[j + 4] >> 4 | packed[j] >> 6 << 4;
    const bool d = copy_half(block, head), m = copy_half(block + 2, head + 32);
    return d && m;
#endif
#else
    __global const uchar* block = row + g * (ROW_BYTES / (K / 32));
    bool finite = copy_half(block, group + 2 * r);
    if (HAS_MIN) finite = copy_half(block + 2, group + 32 + 2 * r) && finite;
    return finite;
#endif
}

// Group g of a row into its tile; false if a scale is not finite.
inline bool pack_group(__global const uchar* row, int g, __global uchar* tile, int r) {
    uchar q[32];
    read_quants(row, g, q);
    __global uchar* quants = tile + GROUP_AT(g) + SCALE_BYTES + 4 * r;
#if WEIGHT_IS(q8_0)
    for (int j = 0; j < 8; ++j) vstore4(vload4(j, q), 0, quants + 64 * j);
#else
    for (int j = 0; j < 4; ++j)
        vstore4((vload4(j, q) & (uchar4)15) | vload4(j + 4, q) << (uchar4)4, 0, quants + 64 * j);
#if HAS_FIFTH_BIT
    uchar4 high = 0;
    for (int j = 0; j < 8; ++j) high |= (vload4(j, q) >> (uchar4)4) << (uchar4)j;
    vstore4(high, 0, quants + 256);
#elif WEIGHT_IS(q6_k)
    for (int half_index = 0; half_index < 2; ++half_index) {
        uchar4 high = 0;
        for (int j = 0; j < 4; ++j) high |= (vload4(4 * half_index + j, q) >> (uchar4)4) << (uchar4)(2 * j);
        vstore4(high, 0, quants + 256 + 64 * half_index);
    }
#endif
#endif
    return copy_scales(row, g, tile, r);
}

__kernel void pack_weight(__global const uchar* source, __global uchar* tiles, __global int* flags, const int first_row,
                          const int first_tile, const int n_tiles, const int flag) {
    const int row = tile_row(first_row + get_global_id(1));
    const int tile = row / 16 - first_tile, r = row % 16;
    if (tile < 0 || tile >= n_tiles) return;
    source += (size_t)get_global_id(1) * ROW_BYTES;
    tiles += (size_t)tile * TILE_SIZE;
    bool finite = true;
    for (int g = get_global_id(0); g < K / 32; g += get_global_size(0)) finite = pack_group(source, g, tiles, r) && finite;
    if (!finite) flags[flag] = 1;
}

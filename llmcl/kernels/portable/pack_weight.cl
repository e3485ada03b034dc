// Repacks a quantised tensor's rows from checkpoint format to the device's quantised tiles (tiles.cl), number for number.
//
// source      uchar [n_rows][row_bytes] in the format with the same name, a run of source rows with k columns
// remaining arguments: as in load_weight.cl; the flag is set for a nonfinite scale or the scale 255 of MXFP4
//
// Index space: (1 to k / 32, n_rows), any local size: a row's work-items share its 32-column groups. Build:
// FORMAT, WEIGHT; sizes are arguments: all matrices of a type share a program.
#if !defined(FORMAT) || !defined(WEIGHT)
#error "pack_weight.cl needs the build constants FORMAT, WEIGHT"
#endif
#define K k  // the kernel's argument, for TILE_SIZE
#include "common/tiles.cl"
#include "common/stored_blocks.cl"
#include "common/tile_row.cl"

inline bool store_half(const uint bits, __global uchar* to) {
    to[0] = bits;
    to[1] = bits >> 8;
    return (bits & 0x7c00) != 0x7c00;  // the exponent bits of NaN and infinity
}

// Copies the scales of row r's group g; returns false for a nonfinite scale.
inline bool copy_scales(__global const uchar* row, int g, __global uchar* tile, int r) {
    __global uchar* group = tile + GROUP_AT(g);
    __global const uchar* block = stored_block(row, 32 * g);
#if WEIGHT_IS(mxfp4)
    group[r] = *block;
    return *block != 255;
#elif WEIGHT_IS(nvfp4)
    group[r] = block[g % 2 * 2];
    group[16 + r] = block[g % 2 * 2 + 1];
    return true;
#else
#if IS_SUPER
    const int2 first = stored_sub_scale(row, 32 * g), second = stored_sub_scale(row, 32 * g + 16);
    group[r] = (uchar)(HAS_HALF_MIN ? first.x | first.y << 4 : first.x);
    if (SCALE_BYTES > 16) group[16 + r] = (uchar)(HAS_MIN ? first.y : HAS_HALF_MIN ? second.x | second.y << 4 : second.x);
    __global uchar* to = tile + g / 8 * SUPER_BYTES + 2 * r;
#else
    __global uchar* to = group + 2 * r;
#endif
    const bool finite = store_half(stored_d(block), to);
#if STORED_MIN
    return store_half(ushort_at(block + STORED_D + 2), to + 32) && finite;
#else
    return finite;
#endif
#endif
}

// Packs a row's group g into its tile; returns false for a nonfinite scale.
inline bool pack_group(__global const uchar* row, int g, __global const ushort* grid, __global uchar* tile, int r) {
    uchar q[32];
    stored_numbers(row, 32 * g, grid, q);
    stored_numbers(row, 32 * g + 16, grid, q + 16);
    __global uchar* quants = tile + GROUP_AT(g) + SCALE_BYTES + 4 * r;
#if WEIGHT_IS(q8_0)
    for (int j = 0; j < 8; ++j) vstore4(vload4(j, q), 0, quants + 64 * j);
#elif HAS_PAIRS
    for (int half_index = 0; half_index < 2; ++half_index) {
        uchar4 pairs = 0;
        for (int j = 0; j < 4; ++j) pairs |= (vload4(4 * half_index + j, q) & (uchar4)3) << (uchar4)(2 * j);
        vstore4(pairs, 0, quants + 64 * half_index);
    }
#if HAS_THIRD_BIT
    uchar4 third = 0;
    for (int j = 0; j < 8; ++j) third |= (vload4(j, q) >> (uchar4)2) << (uchar4)j;
    vstore4(third, 0, quants + HIGH_AT);
#endif
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

__kernel void pack_weight(__global const uchar* source, __global const ushort* grid, __global uchar* tiles, __global int* flags, const int k,
                          const int row_bytes, const int first_row, const int first_tile, const int n_tiles, const int flag,
                          const int head_dim, const int rotary_dim, const int interleaved, const int tile_step,
                          const int tile_offset) {
    const int row = tile_row(first_row + get_global_id(1), head_dim, rotary_dim, interleaved, tile_step, tile_offset);
    const int tile = row / 16 - first_tile, r = row % 16;
    if (tile < 0 || tile >= n_tiles) return;
    source += (size_t)get_global_id(1) * row_bytes;
    tiles += (size_t)tile * TILE_SIZE;
    bool finite = true;
    for (int g = get_global_id(0); g < k / 32; g += get_global_size(0)) finite = pack_group(source, g, grid, tiles, r) && finite;
    if (!finite) flags[flag] = 1;
}

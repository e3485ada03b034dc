// Repacks a quantised tensor's rows from checkpoint format to the device's quantised tiles (tiles.cl), number for number.
//
// source      uchar [n_rows][row_bytes] in the format with the same name, a run of source rows with k columns
// remaining arguments: as in load_weight.cl; the flag is set for a nonfinite scale
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

inline bool copy_half(__global const uchar* from, __global uchar* to) {
    to[0] = from[0];
    to[1] = from[1];
    return (from[1] & 0x7c) != 0x7c;  // the exponent bits of NaN and infinity
}

// Copies the scales of row r's group g; returns false for a nonfinite scale.
inline bool copy_scales(__global const uchar* row, int g, __global uchar* tile, int r) {
    __global uchar* group = tile + GROUP_AT(g);
    __global const uchar* d = stored_block(row, 32 * g) + STORED_D;
#if WEIGHT_IS(mxfp4)
    group[r] = *d;
    return *d != 255;
#else
#if IS_SUPER
    const int2 first = stored_sub_scale(row, 32 * g), second = stored_sub_scale(row, 32 * g + 16);
    group[r] = (uchar)first.x;
    group[16 + r] = (uchar)(HAS_MIN ? first.y : second.x);
    __global uchar* to = tile + g / 8 * SUPER_BYTES + 2 * r;
#else
    __global uchar* to = group + 2 * r;
#endif
    const bool finite = copy_half(d, to);
    return HAS_MIN ? copy_half(d + 2, to + 32) && finite : finite;
#endif
}

// Packs a row's group g into its tile; returns false for a nonfinite scale.
inline bool pack_group(__global const uchar* row, int g, __global uchar* tile, int r) {
    uchar q[32];
    stored_numbers(row, 32 * g, q);
    stored_numbers(row, 32 * g + 16, q + 16);
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

__kernel void pack_weight(__global const uchar* source, __global uchar* tiles, __global int* flags, const int k,
                          const int row_bytes, const int first_row, const int first_tile, const int n_tiles, const int flag,
                          const int head_dim, const int rotary_dim, const int interleaved, const int tile_step,
                          const int tile_offset) {
    const int row = tile_row(first_row + get_global_id(1), head_dim, rotary_dim, interleaved, tile_step, tile_offset);
    const int tile = row / 16 - first_tile, r = row % 16;
    if (tile < 0 || tile >= n_tiles) return;
    source += (size_t)get_global_id(1) * row_bytes;
    tiles += (size_t)tile * TILE_SIZE;
    bool finite = true;
    for (int g = get_global_id(0); g < k / 32; g += get_global_size(0)) finite = pack_group(source, g, tiles, r) && finite;
    if (!finite) flags[flag] = 1;
}

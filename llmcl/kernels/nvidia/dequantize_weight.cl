// A quantised weight's tiles -> float16 tiles, for a product on NVIDIA GPUs' matrix units.
//
//   to[t][k][r] = float16(value of row r, column k of tile first_tile + t), rounded to nearest even
//
// tiles  quantised (tiles.cl)     to  half [n_tiles][K][16]; values beyond float16 become float16's largest
// n      4 K n_tiles / 8: pieces with four rows and columns 4j .. 4j+3 and 4j+16 .. 4j+19 in a group
//
// Index space: one work-item per piece, in the order of the quants. Build: WEIGHT, K, LOCAL_SIZE.
#if !defined(WEIGHT) || !defined(K) || !defined(LOCAL_SIZE)
#error "nvidia/dequantize_weight.cl needs the build constants WEIGHT, K, LOCAL_SIZE"
#endif
#include "common/tiles.cl"
#include "nvidia/ptx.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void dequantize_weight(__global const uchar* tiles, __global uint2* to, const int first_tile, const int n) {
    const int i = get_global_id(0);
    if (i >= n) return;
    const int quad = i % 4, j = i / 4 % 4, g = i / 16 % (K / 32), tile = i / (K / 2);
    tiles += (size_t)(first_tile + tile) * TILE_SIZE;
    to += ((size_t)tile * K + 32 * g + 4 * j) * 4 + quad;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float4 rows[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) rows[r] = weights4_at(tiles, 32 * g + 16 * h + 4 * j, 4 * quad + r);
        to[64 * h] = (uint2)(narrow_f16(rows[0].x, rows[1].x), narrow_f16(rows[2].x, rows[3].x));
        to[64 * h + 4] = (uint2)(narrow_f16(rows[0].y, rows[1].y), narrow_f16(rows[2].y, rows[3].y));
        to[64 * h + 8] = (uint2)(narrow_f16(rows[0].z, rows[1].z), narrow_f16(rows[2].z, rows[3].z));
        to[64 * h + 12] = (uint2)(narrow_f16(rows[0].w, rows[1].w), narrow_f16(rows[2].w, rows[3].w));
    }
}

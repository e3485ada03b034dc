// A quantised weight's tiles -> float16 tiles, for a product on NVIDIA GPUs' matrix units.
//
//   to[t][k][r] = float16(value of row r, column k of tile first_tile + t), rounded to nearest even
//
// tiles  quantised (tiles.cl), with values that float16 can hold     to  half [n_tiles][K][16]
// n      K n_tiles / 4: pieces (quant_piece.cl)
//
// Index space: one work-item a piece, neighbours as in product_quantized.cl. Build: WEIGHT, K, LOCAL_SIZE.
#if !defined(WEIGHT) || !defined(K) || !defined(LOCAL_SIZE)
#error "nvidia/expand_weight.cl needs the build constants WEIGHT, K, LOCAL_SIZE"
#endif
#include "nvidia/quant_piece.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void expand_weight(__global const uchar* tiles, __global uint2* to, const int first_tile, const int n) {
    const int i = get_global_id(0);
    if (i >= n) return;
    const int quad = i % 4, h = i / 4 % 2, g = i / 8 % (K / 32), tile = i / (K / 4);
    piece p;
    load_piece(&p, tiles + (size_t)(first_tile + tile) * TILE_SIZE, g, h, quad);
    to += ((size_t)tile * K + 32 * g + 8 * h) * 4 + quad;
    const scales4 s = scales_of(&p);
    uint q[4][4];
#pragma unroll
    for (int r = 0; r < 4; ++r) unpack(&p, r, h, q[r]);
#pragma unroll
    for (int c = 0; c < 16; ++c) {
        float v[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) v[r] = BYTE_OF(q[r][c / 4], c % 4) * (c < 8 ? s.d[r] : s.d_last[r]) + s.m[r];
        to[(c / 8 * 16 + c % 8) * 4] = (uint2)(pack_f16(v[0], v[1]), pack_f16(v[2], v[3]));
    }
}

// A tensor's rows as a checkpoint stores them -> the device's weight tiles, on the device.
//
//   tiles[r/16][k][r%16] = round(dequantize(source row)[k])
//
// source  uchar [n_rows][ROW_BYTES], a run of source rows: row 0 of it becomes row `first_row` of the weight
// tiles   WEIGHT [n_tiles][K][16]: the weight's tiles from `first_tile` on (one buffer of several, if it had to be split);
//         rows that belong to other tiles are left to other launches
// flags   int [.]: flags[flag] is set to 1 when a stored value is not finite
//
// Formats (FORMAT): F32, F16, BF16, and the blocks of common/stored_blocks.cl.
//
// ROPE_HEAD_DIM > 0: the rows are a q or k projection whose rotary pairs do not lie half a head apart (tile_row.cl).
// TILE_STEP 2: gate and up projections alternate, one at TILE_OFFSET 0, one at 1 (tile_row.cl).
//
// Index space: (1 to K / 16, n_rows), any local size: the work-items of a row share its columns, 16 at a time. Build:
// FORMAT, WEIGHT, K (a multiple of 16; of 32 or 256 for blocks), ROW_BYTES, ROPE_HEAD_DIM, ROTARY_DIM, ROPE_INTERLEAVED, TILE_STEP, TILE_OFFSET.
// Products and sums are rounded one by one, as the format defines.
#if !defined(FORMAT) || !defined(WEIGHT) || !defined(K) || !defined(ROW_BYTES) || !defined(ROPE_HEAD_DIM) || !defined(ROTARY_DIM) || !defined(ROPE_INTERLEAVED) || \
    !defined(TILE_STEP) || !defined(TILE_OFFSET)
#error "load_weight.cl needs the build constants FORMAT, WEIGHT, K, ROW_BYTES, ROPE_HEAD_DIM, ROTARY_DIM, ROPE_INTERLEAVED, TILE_STEP, TILE_OFFSET"
#endif
#include "common/common.cl"
#include "common/stored_blocks.cl"
#include "common/tile_row.cl"
#pragma OPENCL FP_CONTRACT OFF

// The 16 values from column k (a multiple of 16) of a row.
inline void read_columns(__global const uchar* row, int k, float* v) {
#if STORED_IS(F32)
    for (int i = 0; i < 16; ++i) v[i] = ((__global const float*)row)[k + i];
#elif STORED_IS(F16)
    for (int i = 0; i < 16; ++i) v[i] = load1_f16((__global const ushort*)row + k + i);
#elif STORED_IS(BF16)
    for (int i = 0; i < 16; ++i) v[i] = load1_bf16((__global const ushort*)row + k + i);
#else
    uchar q[16];
    stored_numbers(row, k, q);
    const float2 scale = stored_scale(row, k);
    for (int i = 0; i < 16; ++i) {
        v[i] = (float)(STORED_NUMBER(q[i]) - STORED_OFFSET) * scale.x;
        if (STORED_MIN) v[i] += scale.y;
    }
#endif
}

// The 16 values from column k of a row into its tile; false if one is not finite.
inline bool load_columns(__global const uchar* row, int k, __global CAT(WEIGHT, _t)* tile, int r) {
    float v[16];
    read_columns(row, k, v);
    tile += (size_t)k * 16 + r;
    bool finite = true;
    for (int i = 0; i < 16; ++i) {
        CAT(store1_, WEIGHT)(v[i], tile + i * 16);
        // Read back: a value can be finite and yet too large for the storage type.
        finite = finite && isfinite(CAT(load1_, WEIGHT)(tile + i * 16));
    }
    return finite;
}

__kernel void load_weight(__global const uchar* source, __global CAT(WEIGHT, _t)* tiles, __global int* flags,
                          const int first_row, const int first_tile, const int n_tiles, const int flag) {
    const int row = tile_row(first_row + get_global_id(1));
    const int tile = row / 16 - first_tile, r = row % 16;
    if (tile < 0 || tile >= n_tiles) return;
    source += (size_t)get_global_id(1) * ROW_BYTES;
    tiles += (size_t)tile * K * 16;
    bool finite = true;
    for (int k = get_global_id(0) * 16; k < K; k += get_global_size(0) * 16)
        finite = load_columns(source, k, tiles, r) && finite;
    if (!finite) flags[flag] = 1;
}

// Converts a tensor's rows from checkpoint format to the device's weight tiles, on the device.
//
//   tiles[r/16][k][r%16] = round(dequantize(source row)[k])
//
// source  uchar [n_rows][row_bytes], a run of source rows with k columns: its row 0 becomes weight row `first_row`
// grid    ushort [.]: the lookup grid of a format that has one
// tiles   WEIGHT [n_tiles][k][16]: the weight's tiles from `first_tile` on (one of several buffers, if the weight was split);
//         rows for other tiles are left to other launches
// flags   int [.]: flags[flag] is set to 1 for a nonfinite stored value
// k       a multiple of 16; of 32 or 256 for blocks
// head_dim, rotary_dim, interleaved, tile_step, tile_offset: destination rows (tile_row.cl). head_dim > 0: a q or k projection
//         with rotary pairs not half a head apart. tile_step 2: gate and up projections alternate.
//
// Formats (FORMAT): F32, F16, BF16, and the blocks in common/stored_blocks.cl.
//
// Index space: (1 to k / 16, n_rows), any local size: a row's work-items share its columns, 16 at a time. Build:
// FORMAT, WEIGHT; sizes are arguments: all matrices of a type share a program.
// Products and sums are rounded one by one, as the format defines.
#if !defined(FORMAT) || !defined(WEIGHT)
#error "load_weight.cl needs the build constants FORMAT, WEIGHT"
#endif
#include "common/common.cl"
#include "common/stored_blocks.cl"
#include "common/tile_row.cl"
#pragma OPENCL FP_CONTRACT OFF

// Reads a row's 16 values from column k (a multiple of 16) on.
inline void read_columns(__global const uchar* row, int k, __global const ushort* grid, float* v) {
#if STORED_IS(F32)
    for (int i = 0; i < 16; ++i) v[i] = ((__global const float*)row)[k + i];
#elif STORED_IS(F16)
    for (int i = 0; i < 16; ++i) v[i] = load1_f16((__global const ushort*)row + k + i);
#elif STORED_IS(BF16)
    for (int i = 0; i < 16; ++i) v[i] = load1_bf16((__global const ushort*)row + k + i);
#else
    uchar q[16];
    stored_numbers(row, k, grid, q);
    const float2 scale = stored_scale(row, k);
    for (int i = 0; i < 16; ++i) {
        v[i] = (float)(STORED_NUMBER(q[i]) - STORED_OFFSET) * scale.x;
        if (STORED_MIN) v[i] += scale.y;
    }
#endif
}

// Stores a row's 16 values from column k on in its tile; returns false for a nonfinite value.
inline bool load_columns(__global const uchar* row, int k, __global const ushort* grid, __global CAT(WEIGHT, _t)* tile, int r) {
    float v[16];
    read_columns(row, k, grid, v);
    tile += (size_t)k * 16 + r;
    bool finite = true;
    for (int i = 0; i < 16; ++i) {
        CAT(store1_, WEIGHT)(v[i], tile + i * 16);
        // Read back: a value can be finite and yet too large for the storage type.
        finite = finite && isfinite(CAT(load1_, WEIGHT)(tile + i * 16));
    }
    return finite;
}

__kernel void load_weight(__global const uchar* source, __global const ushort* grid, __global CAT(WEIGHT, _t)* tiles, __global int* flags, const int k,
                          const int row_bytes, const int first_row, const int first_tile, const int n_tiles, const int flag,
                          const int head_dim, const int rotary_dim, const int interleaved, const int tile_step,
                          const int tile_offset) {
    const int row = tile_row(first_row + get_global_id(1), head_dim, rotary_dim, interleaved, tile_step, tile_offset);
    const int tile = row / 16 - first_tile, r = row % 16;
    if (tile < 0 || tile >= n_tiles) return;
    source += (size_t)get_global_id(1) * row_bytes;
    tiles += (size_t)tile * k * 16;
    bool finite = true;
    for (int column = get_global_id(0) * 16; column < k; column += get_global_size(0) * 16)
        finite = load_columns(source, column, grid, tiles, r) && finite;
    if (!finite) flags[flag] = 1;
}

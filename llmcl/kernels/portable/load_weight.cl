// A tensor's rows as a checkpoint stores them -> the device's weight tiles, on the device.
//
//   tiles[r/16][k][r%16] = round(dequantize(source row)[k])
//
// source  uchar [n_rows][ROW_BYTES], a run of source rows: row 0 of it becomes row `first_row` of the weight
// tiles   WEIGHT [n_tiles][K][16]: the weight's tiles from `first_tile` on (one buffer of several, if it had to be split);
//         rows that belong to other tiles are left to other launches
// flags   int [.]: flags[flag] is set to 1 when a stored value is not finite
//
// Formats (FORMAT): F32 F16 BF16, and ggml's blocks (ggml-common.h, quantize_row_*_ref), 32 values each:
//   Q4_0 {half d; 16 bytes}  (q - 8) d            Q4_1 {half d, m; 16 bytes}  q d + m       low nibbles first
//   Q5_0 {half d; uint high bits; 16 bytes}       Q5_1 {half d, m; uint; 16 bytes}          fifth bits apart
//   Q8_0 {half d; 32 chars}  q d
// and super-blocks of 256 values:
//   Q4_K {half d, dmin; 12 bytes of 6-bit scales and mins; 128 bytes}    q (d sc) - (dmin m)
//   Q5_K {as Q4_K with 32 bytes of fifth bits before the nibbles}        Q6_K {128 low, 64 high, 16 char scales, half d}
//
// ROPE_HEAD_DIM > 0: the rows are a q or k projection whose heads store the rotation pairs next to each other (GGUF).
// TILE_STEP 2: gate and up projections alternate, one at TILE_OFFSET 0, one at 1 (tile_row.cl).
//
// Index space: (1 to K / 16, n_rows), any local size: the work-items of a row share its columns, 16 at a time. Build:
// FORMAT, WEIGHT, K (a multiple of 16; of 32 or 256 for blocks), ROW_BYTES, ROPE_HEAD_DIM, TILE_STEP, TILE_OFFSET.
// Products and sums are rounded one by one, as the format defines.
#if !defined(FORMAT) || !defined(WEIGHT) || !defined(K) || !defined(ROW_BYTES) || !defined(ROPE_HEAD_DIM) || \
    !defined(TILE_STEP) || !defined(TILE_OFFSET)
#error "load_weight.cl needs the build constants FORMAT, WEIGHT, K, ROW_BYTES, ROPE_HEAD_DIM, TILE_STEP, TILE_OFFSET"
#endif
#include "common/common.cl"
#include "common/tile_row.cl"
#pragma OPENCL FP_CONTRACT OFF

inline float half_at(__global const uchar* p) { return vload_half(0, (__global const half*)p); }
inline uint uint_at(__global const uchar* p) { return p[0] | p[1] << 8 | p[2] << 16 | (uint)p[3] << 24; }

// Each reads the 16 values from column k (a multiple of 16) of a row.
inline void read_F32(__global const uchar* row, int k, float* v) {
    for (int i = 0; i < 16; ++i) v[i] = ((__global const float*)row)[k + i];
}
inline void read_F16(__global const uchar* row, int k, float* v) {
    for (int i = 0; i < 16; ++i) v[i] = load1_f16((__global const ushort*)row + k + i);
}
inline void read_BF16(__global const uchar* row, int k, float* v) {
    for (int i = 0; i < 16; ++i) v[i] = load1_bf16((__global const ushort*)row + k + i);
}

// Low nibbles hold the block's first 16 values, high nibbles the last 16.
inline void read_nibbles(__global const uchar* q, int half_index, float* v) {
    for (int i = 0; i < 16; ++i) v[i] = half_index ? q[i] >> 4 : q[i] & 15;
}
inline void add_fifth_bits(__global const uchar* bits, int half_index, float* v) {
    const uint high = uint_at(bits) >> (16 * half_index);
    for (int i = 0; i < 16; ++i) v[i] += (float)((high >> i & 1u) << 4);
}

inline void read_Q8_0(__global const uchar* row, int k, float* v) {
    __global const uchar* block = row + k / 32 * 34;
    __global const char* q = (__global const char*)block + 2 + k % 32;
    for (int i = 0; i < 16; ++i) v[i] = q[i] * half_at(block);
}
inline void read_Q4_0(__global const uchar* row, int k, float* v) {
    __global const uchar* block = row + k / 32 * 18;
    const float d = half_at(block);
    read_nibbles(block + 2, k / 16 % 2, v);
    for (int i = 0; i < 16; ++i) v[i] = (v[i] - 8.0f) * d;
}
inline void read_Q4_1(__global const uchar* row, int k, float* v) {
    __global const uchar* block = row + k / 32 * 20;
    const float d = half_at(block), m = half_at(block + 2);
    read_nibbles(block + 4, k / 16 % 2, v);
    for (int i = 0; i < 16; ++i) v[i] = v[i] * d + m;
}
inline void read_Q5_0(__global const uchar* row, int k, float* v) {
    __global const uchar* block = row + k / 32 * 22;
    const float d = half_at(block);
    read_nibbles(block + 6, k / 16 % 2, v);
    add_fifth_bits(block + 2, k / 16 % 2, v);
    for (int i = 0; i < 16; ++i) v[i] = (v[i] - 16.0f) * d;
}
inline void read_Q5_1(__global const uchar* row, int k, float* v) {
    __global const uchar* block = row + k / 32 * 24;
    const float d = half_at(block), m = half_at(block + 2);
    read_nibbles(block + 8, k / 16 % 2, v);
    add_fifth_bits(block + 4, k / 16 % 2, v);
    for (int i = 0; i < 16; ++i) v[i] = v[i] * d + m;
}

// The 6-bit scale and minimum of the j-th 32 values of a K super-block.
inline float2 scale_min(__global const uchar* s, int j) {
    if (j < 4) return (float2)(s[j] & 63, s[j + 4] & 63);
    return (float2)((s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4);
}
inline void read_Q4_K(__global const uchar* row, int k, float* v) {
    __global const uchar* block = row + k / 256 * 144;
    const int j = k % 256 / 32, column = k % 32;
    const float2 sm = scale_min(block + 4, j);
    const float d = half_at(block) * sm.x, m = half_at(block + 2) * sm.y;
    __global const uchar* q = block + 16 + j / 2 * 32 + column;
    for (int i = 0; i < 16; ++i) v[i] = d * (float)(j % 2 ? q[i] >> 4 : q[i] & 15) - m;
}
inline void read_Q5_K(__global const uchar* row, int k, float* v) {
    __global const uchar* block = row + k / 256 * 176;
    const int j = k % 256 / 32, column = k % 32;
    const float2 sm = scale_min(block + 4, j);
    const float d = half_at(block) * sm.x, m = half_at(block + 2) * sm.y;
    __global const uchar* high = block + 16 + column;
    __global const uchar* q = block + 48 + j / 2 * 32 + column;
    for (int i = 0; i < 16; ++i)
        v[i] = d * (float)((j % 2 ? q[i] >> 4 : q[i] & 15) + ((high[i] >> j & 1) << 4)) - m;
}
inline void read_Q6_K(__global const uchar* row, int k, float* v) {
    __global const uchar* block = row + k / 256 * 210;
    const int half_index = k % 256 / 128, j = k % 128 / 32, column = k % 32;
    __global const uchar* low = block + half_index * 64 + (j & 1) * 32 + column;
    __global const uchar* high = block + 128 + half_index * 32 + column;
    const float d = half_at(block + 208) * (float)((__global const char*)block)[192 + k % 256 / 16];
    for (int i = 0; i < 16; ++i) {
        const int q = (j < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> (2 * j) & 3) << 4;
        v[i] = d * (float)(q - 32);
    }
}

// The 16 values from column k of a row into its tile; false if one is not finite.
inline bool load_columns(__global const uchar* row, int k, __global CAT(WEIGHT, _t)* tile, int r) {
    float v[16];
    CAT(read_, FORMAT)(row, k, v);
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

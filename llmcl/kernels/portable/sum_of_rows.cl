// Sums a tile's rows over a group's work-items; each work-item always has the same PIECE_ROWS rows.
//
// With LANES (sub_groups.cl) a sub-group's work-items exchange registers: in each turn, the two halves of the work-items with the same
// rows
// swap half their remaining rows, so a lane keeps fewer and fewer. With enough lanes each ends with one row of 16, and local memory only
// holds 16 sums per sub-group. Otherwise all sums meet in local memory:
//
//     the work-items' sums        16 rows of slice 0 | 16 rows of slice 1 | ...      a slice: 16 / PIECE_ROWS neighbours
//     work-item i adds up         row i % 16 in every LOCAL_SIZE / 16-th slice, then work-item i < 16 adds up row i
//
// After portable/tile_pieces.cl. Build: LOCAL_SIZE (a power of two >= 16). A kernel declares ROW_SUMS at its head. Its file may
// first define SUMS_IN_REGISTERS.
#include "common/sub_groups.cl"

#if defined(LANES) && !defined(SUMS_IN_REGISTERS)
#define SUMS_IN_REGISTERS (LOCAL_SIZE >= LANES)
#endif
#if SUMS_IN_REGISTERS
#define PARTS (LOCAL_SIZE / LANES)
#define ROW_SUMS                                                  \
    __local float sums[16 * PARTS] __attribute__((aligned(16))); \
    __local float parts[PARTS] __attribute__((aligned(16)))
#define KEPT_ROWS MAX(1, PIECE_ROWS * TWINS / LANES)
#define KEEPS_ROWS(lid) ((lid) % MAX(TWINS, LANES / PIECE_ROWS) < TWINS)  // the rest have copies

// The sums over all work-items; row i ends up in work-item i < 16.
IN_REGISTERS inline float sum_of_rows(const float* own, __local float* sums, __local float* parts, const int lid) {
    float v[PIECE_ROWS];
    int first = lid % TWINS * PIECE_ROWS, rows = PIECE_ROWS;
#pragma unroll
    for (int i = 0; i < PIECE_ROWS; ++i) v[i] = own[i];
#pragma unroll
    for (int mask = LANES / 2; mask >= TWINS; mask /= 2) {
        const bool is_upper = (lid & mask) != 0;
        if (rows == 1) {
            v[0] += lanes_xor_float(v[0], mask);
            continue;
        }
        rows /= 2;
        first += is_upper ? rows : 0;
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            const float other = lanes_xor_float(is_upper ? v[i] : v[i + rows], mask);
            v[i] = (is_upper ? v[i + rows] : v[i]) + other;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (KEEPS_ROWS(lid))
#pragma unroll
        for (int i = 0; i < KEPT_ROWS; ++i) sums[lid / LANES * 16 + first + i] = v[i];
    barrier(CLK_LOCAL_MEM_FENCE);
    float sum = 0.0f;
    if (lid < 16)
        for (int i = 0; i < PARTS; ++i) sum += sums[16 * i + lid];
    return sum;
}
#else
#define PARTS (LOCAL_SIZE / 16)
#define ROW_SUMS                                                             \
    __local float sums[LOCAL_SIZE * PIECE_ROWS] __attribute__((aligned(16))); \
    __local float parts[LOCAL_SIZE] __attribute__((aligned(16)))

// The sums over all work-items; row i ends up in work-item i < 16.
inline float sum_of_rows(const float* own, __local float* sums, __local float* parts, const int lid) {
#pragma unroll
    for (int i = 0; i < PIECE_ROWS; i += 4)
        *(__local float4*)(sums + lid * PIECE_ROWS + i) = (float4)(own[i], own[i + 1], own[i + 2], own[i + 3]);
    barrier(CLK_LOCAL_MEM_FENCE);
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < PIECE_ROWS; ++i) part += sums[lid + i * LOCAL_SIZE];
    parts[lid] = part;
    barrier(CLK_LOCAL_MEM_FENCE);
    float sum = 0.0f;
    if (lid < 16)
        for (int i = 0; i < PARTS; ++i) sum += parts[lid + 16 * i];
    return sum;
}
#endif

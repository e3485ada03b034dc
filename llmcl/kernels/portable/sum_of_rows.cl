// The sums of a tile's rows over the work-items of a group, each of which has PIECE_ROWS of them, always the same.
//
//     sums of the work-items      16 rows of slice 0 | 16 rows of slice 1 | ...      a slice: 16 / PIECE_ROWS neighbours
//     work-item i adds up         row i % 16 of every LOCAL_SIZE / 16-th slice, then work-item i < 16 row i of these sums
//
// After portable/tile_pieces.cl. Build: LOCAL_SIZE (a power of two >= 16).
#define PARTS (LOCAL_SIZE / 16)

// The sums over all work-items: of row i in work-item i < 16.
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

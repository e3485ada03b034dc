// Rounds a token's activations to 8 bits, as token i in a block (cpu/packed_activations.cl).
// After common/tiles.cl, cpu/quantize_group.cl and cpu/packed_activations.cl. Build: WEIGHT (for its OFFSET; with OUT_WEIGHT the
// consuming product's type), TILE_TOKENS; for quantize_row NORM, EPS.
#ifdef OUT_WEIGHT
#define TAKEN_BY(name) (CAT(ID_, OUT_WEIGHT) == ID_##name)
#else
#define TAKEN_BY WEIGHT_IS
#endif

// Stores a group of 32 numbers in its block; scale: multiplies the token's products.
inline void quantize_numbers(const float16 lo, const float16 hi, const float scale, __global int* block, const int i) {
    char16 q[2];
    const float4 record = quantize_group_for(lo, hi, q, RECORD_OFFSET_OF(TAKEN_BY), HAS_HALF_SCALES_OF(TAKEN_BY));
    *(__global char16*)(block + 8 * i) = q[0];
    *(__global char16*)(block + 8 * i + 4) = q[1];
    block[RECORD_AT(i, 0)] = as_int(record.x);
    block[RECORD_AT(i, 1)] = as_int(record.y);
    block[RECORD_AT(i, 2)] = as_int(HAS_HALF_SCALES_OF(TAKEN_BY) ? record.z : record.w);
    block[RECORD_AT(i, 3)] = as_int(scale);
}

#ifdef NORM
// row: `columns` numbers. rows: the block. begin, end: range of 32-column groups.
inline void quantize_row(__global const float* row, __global const float* norm, const int columns, __global int* rows, const int i,
                         const int begin, const int end) {
    const float scale = row_scale(row, columns);
    for (int g = begin; g < end; ++g)
        quantize_numbers(load_row(row, norm, 32 * g), load_row(row, norm, 32 * g + 16), scale, rows + g * BLOCK8, i);
}
#endif

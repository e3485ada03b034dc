// A token's activations, rounded to 8 bits, as token i of a block (cpu/packed_activations.cl).
// After cpu/quant_tile.cl and cpu/packed_activations.cl. Build: WEIGHT (for its OFFSET), K, DOT > 0, TILE_TOKENS, NORM, EPS.

// rows: the block. begin, end: which groups of 32 columns.
inline void quantize_row(__global const float* row, __global const float* norm, __global int* rows, const int i, const int begin,
                         const int end) {
    const float scale = row_scale(row);
    for (int g = begin; g < end; ++g) {
        __global int* block = rows + g * BLOCK8;
        char16 q[2];
        const float4 record = quantize_group(load_row(row, norm, 32 * g), load_row(row, norm, 32 * g + 16), q);
        *(__global char16*)(block + 8 * i) = q[0];
        *(__global char16*)(block + 8 * i + 4) = q[1];
        block[RECORD_AT(i, 0)] = as_int(record.x);
        block[RECORD_AT(i, 1)] = as_int(record.y);
#if WEIGHT_IS(q6_k)
        block[RECORD_AT(i, 2)] = as_int(record.z);
#else
        block[RECORD_AT(i, 2)] = as_int(record.w);
#endif
        block[RECORD_AT(i, 3)] = as_int(scale);
    }
}

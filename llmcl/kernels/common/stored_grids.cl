// Super-blocks of ggml's formats with lookup grids: an index selects the sizes of 8 numbers (IQ2_*, IQ1_*) or of 4 (IQ3_*).
//
//   IQ3_S   {half d; 64 index bytes, 8 of ninth bits; 32 sign bytes; 4 of scales}         a scale s for 32 columns: d (2s + 1)
//   IQ3_XXS {half d; 64 index bytes; 8 uints of 4 sign codes and a scale}                 d (2s + 1) / 4
//   IQ2_XXS {half d; 8 times 4 index bytes and a uint of 4 sign codes and a scale}        d (2s + 1) / 8
//   IQ2_XS  {half d; 32 ushorts of index and sign code; 8 bytes of scales}                for 16 columns
//   IQ2_S   {half d; 32 index bytes, 32 sign bytes, 8 of upper index bits, 8 of scales}   for 16 columns
//   IQ1_S   {half d; 32 index bytes; 8 ushorts of upper index bits, a scale and the shift's sign}
//   IQ1_M   {32 index bytes; 16 of upper index bits and signs of shifts; 4 ushorts of scales and d}   for 16 columns
//
// A sign code has 7 signs; the number of minus signs is even. IQ1_* shift 8 or 32 numbers by an eighth, up or down.
// A grid's entry has 2 or 3 bits a number, lowest first. Codes are those of number_table.cl.
// Part of common/stored_blocks.cl.
#define GRID_UNIT (STORED_IS(IQ3_S) ? 1.0f : STORED_IS(IQ3_XXS) ? 0.25f : 0.125f)
#define STORED_BYTES \
    (STORED_IS(IQ3_S) ? 110 : STORED_IS(IQ3_XXS) ? 98 : STORED_IS(IQ2_S) ? 82 : STORED_IS(IQ2_XS) ? 74 : STORED_IS(IQ2_XXS) ? 66 : STORED_IS(IQ1_M) ? 56 : 50)
#define STORED_D 0

inline uint uint_at(__global const uchar* at) { return ushort_at(at) | ushort_at(at + 2) << 16; }
inline uint signs_of(const uint code) { return code | (popcount(code) & 1) << 7; }

// Returns the index of grid entry i: of 8 columns, with IQ3_* of 4.
inline uint grid_index(__global const uchar* block, const int i) {
#if STORED_IS(IQ3_S)
    return block[2 + i] | (block[66 + i / 8] >> (i % 8) & 1) << 8;
#elif STORED_IS(IQ3_XXS)
    return block[2 + i];
#elif STORED_IS(IQ2_XXS)
    return block[2 + i / 4 * 8 + i % 4];
#elif STORED_IS(IQ2_XS)
    return ushort_at(block + 2 + 2 * i) & 511;
#elif STORED_IS(IQ2_S)
    return block[2 + i] | (block[66 + i / 4] >> (i % 4 * 2) & 3) << 8;
#elif STORED_IS(IQ1_S)
    return block[2 + i] | (ushort_at(block + 34 + i / 4 * 2) >> (i % 4 * 3) & 7) << 8;
#else
    return block[i] | (block[32 + i / 2] >> (i % 2 * 4) & 7) << 8;
#endif
}

// Returns the signs of columns 8i .. 8i+7, a bit each, set for minus; with IQ1_* whether the shift is down.
inline uint grid_signs(__global const uchar* block, const int i) {
#if STORED_IS(IQ3_S)
    return block[74 + i];
#elif STORED_IS(IQ3_XXS)
    return signs_of(uint_at(block + 66 + i / 4 * 4) >> (i % 4 * 7) & 127);
#elif STORED_IS(IQ2_XXS)
    return signs_of(uint_at(block + 6 + i / 4 * 8) >> (i % 4 * 7) & 127);
#elif STORED_IS(IQ2_XS)
    return signs_of(ushort_at(block + 2 + 2 * i) >> 9);
#elif STORED_IS(IQ2_S)
    return block[34 + i];
#elif STORED_IS(IQ1_S)
    return block[35 + i / 4 * 2] >> 7;
#else
    return block[32 + i / 2] >> (i % 2 * 4 + 3) & 1;
#endif
}

// Returns 2s + 1 for columns 16 sub .. 16 sub + 15.
inline int grid_scale(__global const uchar* block, const int sub) {
#if STORED_IS(IQ3_S)
    const uint s = block[106 + sub / 4] >> (sub / 2 % 2 * 4) & 15;
#elif STORED_IS(IQ3_XXS)
    const uint s = block[69 + sub / 2 * 4] >> 4;
#elif STORED_IS(IQ2_XXS)
    const uint s = block[9 + sub / 2 * 8] >> 4;
#elif STORED_IS(IQ2_XS)
    const uint s = block[66 + sub / 2] >> (sub % 2 * 4) & 15;
#elif STORED_IS(IQ2_S)
    const uint s = block[74 + sub / 2] >> (sub % 2 * 4) & 15;
#elif STORED_IS(IQ1_S)
    const uint s = block[35 + sub / 2 * 2] >> 4 & 7;
#else
    const uint s = ushort_at(block + 48 + sub / 4 * 2) >> (sub % 4 * 3) & 7;
#endif
    return 2 * s + 1;
}

#if STORED_IS(IQ1_M)
inline ushort scattered_d(__global const uchar* block) {
    return block[49] >> 4 | (block[51] & 0xf0) | (block[53] & 0xf0) << 4 | (block[55] & 0xf0) << 8;
}
#endif

// Computes the codes of columns k .. k+15 (within the block).
inline void grid_numbers(__global const uchar* block, const int k, __global const ushort* grid, uchar* q) {
    for (int i = 0; i < 16; ++i) {
        const uint signs = grid_signs(block, (k + i) / 8), minus = signs >> (i % 8) & 1;
#if STORED_IS(IQ3_S) || STORED_IS(IQ3_XXS)
        const uint size = grid[grid_index(block, (k + i) / 4)] >> (i % 4 * 3) & 7;
        q[i] = minus ? 7 - size : 8 + size;
#else
        const uint size = grid[grid_index(block, (k + i) / 8)] >> (i % 8 * 2) & 3;
        q[i] = STORED_IS(IQ1_S) || STORED_IS(IQ1_M) ? 2 * size + 1 - signs : minus ? 2 - size : 3 + size;
#endif
    }
}

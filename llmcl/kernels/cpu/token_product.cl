// The product of TILE_TOKENS tokens with TILE_COLS tiles of 16 rows on a CPU, its sums in registers.
// After common/tiles.cl. Build: WEIGHT, K, TILE_TOKENS, TILE_COLS.
#if QUANTIZED
#define DOT 0
#include "cpu/quant_tile.cl"
#endif

// acc[i][c] = tile c times rows[i], a token's K numbers.
IN_REGISTERS inline void multiply_tokens(float16 acc[TILE_TOKENS][TILE_COLS], __global const CAT(WEIGHT, _t)* weight,
                                         __global const float* rows[TILE_TOKENS]) {
#pragma unroll
    for (int i = 0; i < TILE_TOKENS; ++i)
#pragma unroll
        for (int c = 0; c < TILE_COLS; ++c) acc[i][c] = 0;

#if QUANTIZED
    for (int g = 0; g < K / 32; ++g) {
        float16 columns[TILE_COLS][32];
        for (int c = 0; c < TILE_COLS; ++c) widen_group(weight + c * TILE_SIZE, g, columns[c]);
        for (int k = 0; k < 32; ++k)
#pragma unroll
            for (int i = 0; i < TILE_TOKENS; ++i)
#pragma unroll
                for (int c = 0; c < TILE_COLS; ++c) acc[i][c] += columns[c][k] * rows[i][32 * g + k];
    }
#else
    for (int k = 0; k < K; ++k) {
        float16 w[TILE_COLS];
#pragma unroll
        for (int c = 0; c < TILE_COLS; ++c) w[c] = CAT(load16_, WEIGHT)(weight + (size_t)c * K * 16 + k * 16);
#pragma unroll
        for (int i = 0; i < TILE_TOKENS; ++i)
#pragma unroll
            for (int c = 0; c < TILE_COLS; ++c) acc[i][c] += w[c] * rows[i][k];
    }
#endif
}

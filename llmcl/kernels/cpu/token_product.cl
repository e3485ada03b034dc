// Multiplies many tokens by TILE_COLS tiles of 16 rows on a CPU, in float32.
//
// A token's sums are added in the same order as in cpu/tile_product.cl, so a token has the same bits alone and in a batch:
//   quantised   a group's 32 columns separately, then times its scales (add_group in cpu/quant_tile.cl)
//   otherwise   four sums, each over every fourth column
// TILE_TOKENS by TILE_COLS sums stay in registers over a run of columns; at the end TAIL_TOKENS if no more are left.
//
// A row is a token's K numbers. If a row has ROW_FLOATS floats (cpu/norm_activations.cl), the sums of its 32-column groups
// follow.
// After common/tiles.cl. Build: WEIGHT, K, TILE_TOKENS, TAIL_TOKENS, TILE_COLS; MOST_TOKENS at once.
#if QUANTIZED
#define DOT 0
#include "cpu/quant_tile.cl"
#endif

typedef __global const float* token_row;
#define ROWS_PADDED ((MOST_TOKENS + TILE_TOKENS - 1) / TILE_TOKENS * TILE_TOKENS)

#if QUANTIZED
// Adds the products of each tile's group g to the sums of `rows` (a constant) tokens.
IN_REGISTERS inline void multiply_block(float16 (*sum)[TILE_COLS], float16 (*columns)[32], const scales16* scales,
                                        const token_row* rows, const int g, const int n) {
    float16 parts[2][TILE_TOKENS][TILE_COLS];
    for (int h = 0; h < 2; ++h) {
        float16 acc[TILE_TOKENS][TILE_COLS];
#pragma unroll
        for (int i = 0; i < n; ++i)
#pragma unroll
            for (int c = 0; c < TILE_COLS; ++c) acc[i][c] = 0;
#pragma nounroll
        for (int k = 16 * h; k < 16 * h + 16; ++k)
#pragma unroll
            for (int i = 0; i < n; ++i)
#pragma unroll
                for (int c = 0; c < TILE_COLS; ++c) acc[i][c] += columns[c][k] * rows[i][32 * g + k];
#pragma unroll
        for (int i = 0; i < n; ++i)
#pragma unroll
            for (int c = 0; c < TILE_COLS; ++c) parts[h][i][c] = acc[i][c];
    }
    for (int i = 0; i < n; ++i)
        for (int c = 0; c < TILE_COLS; ++c)
            sum[i][c] = add_group(sum[i][c], parts[0][i][c], parts[1][i][c], scales[c], HAS_MIN ? rows[i][K + g] : 0.0f);
}
#else
#define RUN 128  // columns: few enough to keep the weights in the first-level cache

// The sums for `n` (a constant) tokens.
IN_REGISTERS inline void multiply_block(float16 (*sum)[TILE_COLS], __global const CAT(WEIGHT, _t)* weight,
                                        const token_row* rows, const int n) {
    float16 parts[4][TILE_TOKENS][TILE_COLS];
    for (int part = 0; part < 4; ++part)
        for (int i = 0; i < n; ++i)
            for (int c = 0; c < TILE_COLS; ++c) parts[part][i][c] = 0;
    for (int begin = 0; begin < K; begin += RUN) {
        for (int part = 0; part < 4; ++part) {
            float16 acc[TILE_TOKENS][TILE_COLS];
#pragma unroll
            for (int i = 0; i < n; ++i)
#pragma unroll
                for (int c = 0; c < TILE_COLS; ++c) acc[i][c] = parts[part][i][c];
            const int end = min(begin + RUN, K);
#pragma nounroll
            for (int k = begin + part; k < end; k += 4) {
                float16 w[TILE_COLS];
#pragma unroll
                for (int c = 0; c < TILE_COLS; ++c) w[c] = CAT(load16_, WEIGHT)(weight + (size_t)c * K * 16 + k * 16);
#pragma unroll
                for (int i = 0; i < n; ++i)
#pragma unroll
                    for (int c = 0; c < TILE_COLS; ++c) acc[i][c] += w[c] * rows[i][k];
            }
#pragma unroll
            for (int i = 0; i < n; ++i)
#pragma unroll
                for (int c = 0; c < TILE_COLS; ++c) parts[part][i][c] = acc[i][c];
        }
    }
    for (int i = 0; i < n; ++i)
        for (int c = 0; c < TILE_COLS; ++c)
            sum[i][c] = (parts[0][i][c] + parts[1][i][c]) + (parts[2][i][c] + parts[3][i][c]);
}
#endif

// sum[i][c] = tile c times rows[i], for n tokens. There are ROWS_PADDED rows: rows past the last are computed, too.
inline void multiply_tokens(float16 (*sum)[TILE_COLS], __global const CAT(WEIGHT, _t)* weight, const token_row* rows,
                            const int n) {
#if QUANTIZED
    for (int i = 0; i < ROWS_PADDED; ++i)
        for (int c = 0; c < TILE_COLS; ++c) sum[i][c] = 0;
    for (int g = 0; g < K / 32; ++g) {
        float16 columns[TILE_COLS][32];
        scales16 scales[TILE_COLS];
        for (int c = 0; c < TILE_COLS; ++c) {
            widen_group(weight + c * TILE_SIZE, g, columns[c]);
            scales[c] = load_scales(weight + c * TILE_SIZE, g);
        }
        for (int t = 0; t < n; t += TILE_TOKENS) {
            if (n - t > TAIL_TOKENS) multiply_block(sum + t, columns, scales, rows + t, g, TILE_TOKENS);
            else multiply_block(sum + t, columns, scales, rows + t, g, TAIL_TOKENS);
        }
    }
#else
    for (int t = 0; t < n; t += TILE_TOKENS) {
        if (n - t > TAIL_TOKENS) multiply_block(sum + t, weight, rows + t, TILE_TOKENS);
        else multiply_block(sum + t, weight, rows + t, TAIL_TOKENS);
    }
#endif
}

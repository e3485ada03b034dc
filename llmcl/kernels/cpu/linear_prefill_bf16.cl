// Y = X W^T for a step's tokens on a CPU with bfloat16 dot products: bfloat16 weights, activations from pack_activations.
//
//   y[t][r] = sum_k x[t][k] W[r][k], two k at a time;   EPILOGUE as in cpu/linear_decode.cl (SWIGLU: tiles alternate gate, up)
//
// weight   n_tiles tiles (tiles.cl)     x  the step's activations in bfloat16 blocks (cpu/packed_activations.cl)
// out      float [n][out_stride], columns out_row .. out_row + n_rows - 1
//
// Index space: (streams, ceil(n / GROUP_TOKENS)), local size 1; stream g takes units g U / G .. (g + 1) U / G, as in
// cpu/linear_decode.cl, with a unit of TILE_COLS tiles. For columns k, k + 1 a lane gets its row's two weights
// side by side, once for TILE_TOKENS tokens with sums in registers; for the last tokens a multiple of TAIL_STEP is computed:
//
//   k      r0 r1 ... r15
//   k + 1  r0 r1 ... r15   ->   r0 r0 | r1 r1 | ... | r15 r15   16 lanes of 2 x 16 bits
//
// Build: K (a multiple of 16), EPILOGUE, DOT (cpu/dot2.cl), TILE_TOKENS, TILE_COLS (1; 2 with SWIGLU), GROUP_TOKENS
// (a multiple of TILE_TOKENS), TAIL_STEP (all, a half or a quarter of TILE_TOKENS). Accumulation: float32.
#if !defined(K) || !defined(EPILOGUE) || !defined(DOT) || \
    !defined(TILE_TOKENS) || !defined(TILE_COLS) || !defined(GROUP_TOKENS) || !defined(TAIL_STEP) || !defined(STATE_N_TOKENS)
#error "cpu/linear_prefill_bf16.cl needs the build constants K, EPILOGUE, DOT, TILE_TOKENS, TILE_COLS, GROUP_TOKENS, TAIL_STEP and those of the step state"
#endif
#include "common/common.cl"
#include "cpu/dot2.cl"
#include "cpu/packed_activations.cl"

typedef ushort ushort32 __attribute__((ext_vector_type(32), aligned(32)));

inline uint16 pairs(__global const bf16_t* w) {
    const ushort32 v = *(__global const ushort32*)w;
    return __builtin_astype(__builtin_shufflevector(v, v, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26,
                                                    11, 27, 12, 28, 13, 29, 14, 30, 15, 31), uint16);
}

// acc = a tile's products with `rows` (a constant) tokens.
IN_REGISTERS inline void multiply_tile(__global const bf16_t* tile, __global const uint* x, float16* acc, const int rows) {
    float16 sum[TILE_TOKENS];
#pragma unroll
    for (int i = 0; i < rows; ++i) sum[i] = 0;
#pragma nounroll
    for (int k = 0; k < K; k += 16, x += NUMBERS) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const uint16 w = pairs(tile + (k + 2 * j) * 16);
#pragma unroll
            for (int i = 0; i < rows; ++i) sum[i] = dot2(sum[i], w, x[i * 8 + j]);
        }
    }
#pragma unroll
    for (int i = 0; i < rows; ++i) acc[i] = sum[i];
}

#define WEIGHT_ITEM bf16_t
#define TILE_SIZE ((size_t)K * 16)
#define X_ITEM uint
#define TOKENS_SIZE ((K / 16) * NUMBERS)
#include "cpu/linear_prefill_units.cl"

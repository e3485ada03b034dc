// Y = X W^T for the tokens of a step on Intel's matrix units, operands in the weight's 16 bits, sums in float32.
// Formula and epilogues as in cpu/linear_prefill.cl.
//
// weight  tiles [K][16] (tiles.cl)     x  WEIGHT [ceil(n/8)][K/16][8][16] (intel/pack_rows.cl)     out  float [n][OUT_STRIDE]
//
// A sub-group of 8 lanes multiplies a tile, or a gate tile and its up tile, with TOKENS tokens, 16 columns a turn:
//
//   A  8 tokens by 16 columns    one block read of 256 bytes: word l of row m in lane l
//   B  16 columns by 8 rows      four block reads with 16-bit numbers fetch 16 rows by 16 columns: lane l has rows l and l + 8;
//                                 two neighbouring columns become a word
//   sums                         float8 for 8 tokens, row l (or l + 8) in lane l
//
// Index space: (ceil(units / SUB_GROUPS), ceil(n / TOKENS)) groups, 8 SUB_GROUPS work-items each. A group's sub-groups have
// neighbouring tiles and the same tokens, shared through the cache. Nothing is in local memory, and there is no barrier.
// Build: WEIGHT (bf16 or f16), K (a multiple of 16), N, N_TILES, OUT_STRIDE, EPILOGUE, GATE if the epilogue has a gate, TOKENS (16
// with a gate, otherwise 32), SUB_GROUPS, MATRIX.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(OUT_STRIDE) || !defined(EPILOGUE) || \
    !defined(TOKENS) || !defined(SUB_GROUPS) || !defined(MATRIX) || !defined(STATE_N_TOKENS)
#error "intel/linear_prefill.cl needs the build constants WEIGHT, K, N, N_TILES, OUT_STRIDE, EPILOGUE, TOKENS, SUB_GROUPS, MATRIX and those of the step state"
#endif
#include "common/tiles.cl"
#include "intel/matrix_mad.cl"

#define TILES_AT_ONCE (EPILOGUE == EPILOGUE_SWIGLU ? 2 : 1)
#define BLOCKS (TOKENS / 8)
#define PAIR(low, high) ((int)((uint)(low) | (uint)(high) << 16))

// 16 columns of a tile: b[h], rows 8h .. 8h+7.
inline void load_columns16(int8 b[2], __global const ushort* tile) {
    const ushort8 c0 = intel_sub_group_block_read_us8(tile), c4 = intel_sub_group_block_read_us8(tile + 64),
                  c8 = intel_sub_group_block_read_us8(tile + 128), c12 = intel_sub_group_block_read_us8(tile + 192);
    b[0] = (int8)(PAIR(c0.s0, c0.s2), PAIR(c0.s4, c0.s6), PAIR(c4.s0, c4.s2), PAIR(c4.s4, c4.s6), PAIR(c8.s0, c8.s2),
                  PAIR(c8.s4, c8.s6), PAIR(c12.s0, c12.s2), PAIR(c12.s4, c12.s6));
    b[1] = (int8)(PAIR(c0.s1, c0.s3), PAIR(c0.s5, c0.s7), PAIR(c4.s1, c4.s3), PAIR(c4.s5, c4.s7), PAIR(c8.s1, c8.s3),
                  PAIR(c8.s5, c8.s7), PAIR(c12.s1, c12.s3), PAIR(c12.s5, c12.s7));
}

__kernel __attribute__((reqd_work_group_size(8 * SUB_GROUPS, 1, 1))) __attribute__((intel_reqd_sub_group_size(8)))
void linear_prefill(__global const ushort* weight, __global const uint* x, __global float* out, __global const int* state,
                    const int out_row) {
    const int lane = get_local_id(0) % 8, first_token = get_group_id(1) * TOKENS, n = state[STATE_N_TOKENS];
    const int unit = get_group_id(0) * SUB_GROUPS + get_local_id(0) / 8;
    if (unit * TILES_AT_ONCE >= N_TILES) return;  // a whole sub-group
    weight += (size_t)unit * TILES_AT_ONCE * TILE_SIZE;
    // Past the last block, computes the last block again without storing.
    const int last_block = (n + 7) / 8 - 1;
    __global const uint* tokens[BLOCKS];
    float8 acc[TILES_AT_ONCE][2][BLOCKS];
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
        tokens[i] = x + (size_t)min(first_token / 8 + i, last_block) * (K / 16) * 64;
#pragma unroll
        for (int t = 0; t < TILES_AT_ONCE; ++t) acc[t][0][i] = acc[t][1][i] = 0.0f;
    }
    for (int k = 0; k < K / 16; ++k) {
        int8 b[TILES_AT_ONCE][2];
#pragma unroll
        for (int t = 0; t < TILES_AT_ONCE; ++t) load_columns16(b[t], weight + t * TILE_SIZE + k * 256);
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
            const int8 a = as_int8(intel_sub_group_block_read8(tokens[i] + k * 64));
#pragma unroll
            for (int t = 0; t < TILES_AT_ONCE; ++t) {
                acc[t][0][i] = matrix_mad(a, b[t][0], acc[t][0][i]);
                acc[t][1][i] = matrix_mad(a, b[t][1], acc[t][1][i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = unit * 16 + 8 * h + lane;
#if EPILOGUE == EPILOGUE_SWIGLU
            const float8 y = GATE_VALUE(acc[0][h][i], exp) * acc[1][h][i];
#else
            const float8 y = acc[0][h][i];
#endif
            const float values[8] = {y.s0, y.s1, y.s2, y.s3, y.s4, y.s5, y.s6, y.s7};
#pragma unroll
            for (int m = 0; m < 8; ++m) {
                const int token = first_token + 8 * i + m;
                if (row >= N || token >= n) continue;
                __global float* to = out + (size_t)token * OUT_STRIDE + out_row + row;
                *to = EPILOGUE == EPILOGUE_ADD ? *to + values[m] : values[m];
            }
        }
}

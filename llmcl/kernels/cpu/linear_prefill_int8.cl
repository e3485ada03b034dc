// Y = X W^T for the tokens of a step on a CPU with 8-bit dot products: quantised weights, activations of quantize_activations.
//
//   y[t][r] as in cpu/quant_tile.cl;   EPILOGUE as in cpu/linear_decode.cl (SWIGLU: tiles alternate gate, up)
//
// weight   tiles of WEIGHT (tiles.cl)      x  the step's activations in blocks of 8 bits (cpu/packed_activations.cl)
// out      float [n][OUT_STRIDE], columns out_row .. out_row + N - 1
//
// Index space: (streams, ceil(n / GROUP_TOKENS)), local size 1; stream g takes units g U / G .. (g + 1) U / G, as in
// cpu/linear_decode.cl, a unit being TILE_COLS tiles. Four columns of 16 rows are unpacked once and multiplied with TILE_TOKENS
// tokens, whose integer and float32 sums stay in registers; where at most TAIL_TOKENS are left, with so many.
// The sums of a token are those of cpu/linear_decode.cl, in the same order.
//
// Build: WEIGHT, K, N, N_TILES, OUT_STRIDE, EPILOGUE, DOT > 0, TILE_TOKENS, TILE_COLS (1; 2 with SWIGLU), GROUP_TOKENS (a
// multiple of TILE_TOKENS), TAIL_TOKENS (0: none).
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(OUT_STRIDE) || \
    !defined(EPILOGUE) || !defined(DOT) || !defined(TILE_TOKENS) || !defined(TILE_COLS) || !defined(GROUP_TOKENS) || \
    !defined(TAIL_TOKENS) || !defined(STATE_N_TOKENS)
#error "cpu/linear_prefill_int8.cl needs the build constants WEIGHT, K, N, N_TILES, OUT_STRIDE, EPILOGUE, DOT, TILE_TOKENS, TILE_COLS, GROUP_TOKENS, TAIL_TOKENS and those of the step state"
#endif
#include "cpu/quant_tile.cl"
#include "cpu/packed_activations.cl"
#include "cpu/store_rows.cl"

// acc = the products of a tile with `rows` (a constant) tokens.
IN_REGISTERS inline void multiply_tile(__global const uchar* tile, __global const int* x, float16* acc, const int rows) {
    float16 sum[TILE_TOKENS];
    __global const int* tokens = x;
#pragma unroll
    for (int i = 0; i < rows; ++i) sum[i] = 0;
#pragma nounroll
    for (int g = 0; g < K / 32; ++g, x += BLOCK8) {
        __global const uchar* q = tile + GROUP_AT(g) + SCALE_BYTES;
        __global const float* scale = (__global const float*)x;
        const scales16 s = load_scales(tile, g);
        int16 a[TILE_TOKENS];
#if WEIGHT_IS(q6_k)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int i = 0; i < rows; ++i) a[i] = (int16)(x[RECORD_AT(i, 1 + h)]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint16 w = columns4(q, 4 * h + j);
#pragma unroll
                for (int i = 0; i < rows; ++i) a[i] = dot4(a[i], w, x[i * 8 + 4 * h + j]);
            }
#pragma unroll
            for (int i = 0; i < rows; ++i)
                sum[i] += CONVERT16(a[i], float) * ((h ? s.d_high : s.d) * scale[RECORD_AT(i, 0)]);
        }
#else
#pragma unroll
        for (int i = 0; i < rows; ++i) a[i] = (int16)(OFFSET ? x[RECORD_AT(i, 1)] : 0);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const uint16 w = columns4(q, (j & 1) * 4 + j / 2);  // both nibbles of a vector in turn
#pragma unroll
            for (int i = 0; i < rows; ++i) a[i] = dot4(a[i], w, x[i * 8 + (j & 1) * 4 + j / 2]);
        }
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            sum[i] += CONVERT16(a[i], float) * (s.d * scale[RECORD_AT(i, 0)]);
#if HAS_MIN
            sum[i] += s.m * scale[RECORD_AT(i, 2)];
#endif
        }
#endif
    }
#pragma unroll
    for (int i = 0; i < rows; ++i) acc[i] = sum[i] * ((__global const float*)tokens)[RECORD_AT(i, 3)];
}

// All of a unit for the tokens t .. min(t + rows, end) - 1.
IN_REGISTERS inline void multiply_unit(__global const uchar* weight, __global const int* x, __global float* out, const int unit,
                                       const int t, const int end, const int rows) {
    weight += (size_t)unit * TILE_COLS * TILE_SIZE;
    x += (size_t)(t / TILE_TOKENS) * (K / 32) * BLOCK8;
    out += (size_t)t * OUT_STRIDE;
    float16 acc[TILE_COLS][TILE_TOKENS];
    for (int c = 0; c < TILE_COLS; ++c) multiply_tile(weight + c * TILE_SIZE, x, acc[c], rows);
    for (int i = 0; i < rows && t + i < end; ++i, out += OUT_STRIDE) {
#if EPILOGUE == EPILOGUE_SWIGLU
        store_rows(GATE_VALUE(acc[0][i], exp16) * acc[1][i], out, unit * 16);
#else
        for (int c = 0; c < TILE_COLS; ++c) store_rows(acc[c][i], out, (unit * TILE_COLS + c) * 16);
#endif
    }
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void linear_prefill(__global const uchar* weight, __global const int* x, __global float* out, __global const int* state,
                    const int out_row) {
    const int units = N_TILES / TILE_COLS;
    const int first = (int)((long)units * get_group_id(0) / get_num_groups(0));
    const int last = (int)((long)units * (get_group_id(0) + 1) / get_num_groups(0));
    const int end = min(state[STATE_N_TOKENS], (int)(get_group_id(1) + 1) * GROUP_TOKENS);
    out += out_row;
    for (int unit = first; unit < last; ++unit) {
        for (int t = get_group_id(1) * GROUP_TOKENS; t < end; t += TILE_TOKENS) {
            if (end - t > TAIL_TOKENS)
                multiply_unit(weight, x, out, unit, t, end, TILE_TOKENS);
            else
                multiply_unit(weight, x, out, unit, t, end, TAIL_TOKENS);
        }
    }
}

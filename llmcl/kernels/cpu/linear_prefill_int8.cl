// Y = X W^T for the tokens of a step on a CPU with 8-bit dot products: quantised weights, activations of quantize_activations.
//
//   y[t][r] as in cpu/quant_tile.cl;   EPILOGUE as in cpu/linear_decode.cl (SWIGLU: tiles alternate gate, up)
//
// weight   tiles of WEIGHT (tiles.cl)      x  the step's activations in blocks of 8 bits (cpu/packed_activations.cl)
// out      float [n][OUT_STRIDE], columns out_row .. out_row + N - 1
//
// Index space: (N_TILES / TILE_COLS, ceil(n / GROUP_TOKENS)), local size 1. Four columns of 16 rows are unpacked once and
// multiplied with TILE_TOKENS tokens; their sums and the float32 accumulators stay in registers.
//
// Build: WEIGHT, K, N, N_TILES, OUT_STRIDE, EPILOGUE, DOT > 0, TILE_TOKENS, TILE_COLS (1; 2 with SWIGLU), GROUP_TOKENS (a
// multiple of TILE_TOKENS).
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(OUT_STRIDE) || \
    !defined(EPILOGUE) || !defined(DOT) || !defined(TILE_TOKENS) || !defined(TILE_COLS) || !defined(GROUP_TOKENS) || \
    !defined(STATE_N_TOKENS)
#error "cpu/linear_prefill_int8.cl needs the build constants WEIGHT, K, N, N_TILES, OUT_STRIDE, EPILOGUE, DOT, TILE_TOKENS, TILE_COLS, GROUP_TOKENS and those of the step state"
#endif
#include "cpu/quant_tile.cl"
#include "cpu/packed_activations.cl"
#include "cpu/store_rows.cl"

inline void multiply_tile(__global const uchar* tile, __global const int* x, float16* acc) {
    float16 sum[TILE_TOKENS];
#pragma unroll
    for (int i = 0; i < TILE_TOKENS; ++i) sum[i] = 0;
    for (int g = 0; g < K / 32; ++g, x += BLOCK8) {
        __global const uchar* q = tile + GROUP_AT(g) + SCALE_BYTES;
        __global const int* start = x + NUMBERS + TILE_TOKENS;
        __global const float *scale = (__global const float*)(x + NUMBERS), *second = scale + 2 * TILE_TOKENS;
        const scales16 s = load_scales(tile, g);
        int16 a[TILE_TOKENS];
#if WEIGHT_IS(q6_k)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int i = 0; i < TILE_TOKENS; ++i) a[i] = (int16)(start[h * TILE_TOKENS + i]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint16 w = columns4(q, 4 * h + j);
#pragma unroll
                for (int i = 0; i < TILE_TOKENS; ++i) a[i] = dot4(a[i], w, x[i * 8 + 4 * h + j]);
            }
#pragma unroll
            for (int i = 0; i < TILE_TOKENS; ++i) sum[i] += CONVERT16(a[i], float) * ((h ? s.d_high : s.d) * scale[i]);
        }
#else
#pragma unroll
        for (int i = 0; i < TILE_TOKENS; ++i) a[i] = (int16)(OFFSET ? start[i] : 0);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const uint16 w = columns4(q, (j & 1) * 4 + j / 2);  // both nibbles of a vector in turn
#pragma unroll
            for (int i = 0; i < TILE_TOKENS; ++i) a[i] = dot4(a[i], w, x[i * 8 + (j & 1) * 4 + j / 2]);
        }
#pragma unroll
        for (int i = 0; i < TILE_TOKENS; ++i) {
            sum[i] += CONVERT16(a[i], float) * (s.d * scale[i]);
#if HAS_MIN
            sum[i] += s.m * second[i];
#endif
        }
#endif
    }
#pragma unroll
    for (int i = 0; i < TILE_TOKENS; ++i) acc[i] = sum[i];
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void linear_prefill(__global const uchar* weight, __global const int* x, __global float* out, __global const int* state,
                    const int out_row) {
    const int n = state[STATE_N_TOKENS];
    const int tile = get_group_id(0) * TILE_COLS;
    const int end = min(n, (int)(get_group_id(1) + 1) * GROUP_TOKENS);
    weight += tile * TILE_SIZE;
    out += out_row;
    for (int t = get_group_id(1) * GROUP_TOKENS; t < end; t += TILE_TOKENS) {
        __global const int* rows = x + (size_t)(t / TILE_TOKENS) * (K / 32) * BLOCK8;
        float16 acc[TILE_COLS][TILE_TOKENS];
        for (int c = 0; c < TILE_COLS; ++c) multiply_tile(weight + c * TILE_SIZE, rows, acc[c]);
        for (int i = 0; i < TILE_TOKENS && t + i < end; ++i) {
            __global float* y = out + (size_t)(t + i) * OUT_STRIDE;
#if EPILOGUE == EPILOGUE_SWIGLU
            store_rows(GATE_VALUE(acc[0][i], exp16) * acc[1][i], y, tile / 2 * 16);
#else
            for (int c = 0; c < TILE_COLS; ++c) store_rows(acc[c][i], y, (tile + c) * 16);
#endif
        }
    }
}

// y = W x for one token on any device, quantised weights: one work-group a 16-row tile (two tiles with SWIGLU).
// Formula, arguments and build constants as in cpu/linear_decode.cl, x stays float32; and
//   LOCAL_SIZE  work-items of a group, a power of two >= 16
//
//     work-item:  0 .. 15             16 .. 31           ...       rows of the tile: work-item % 16
//     group g:    0, P, 2P, ...       1, P + 1, ...                P = LOCAL_SIZE / 16 groups of 32 columns at once
//
// Neighbours read neighbouring 4 bytes. Local memory: 8 LOCAL_SIZE bytes.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(NORM) || !defined(EPS) || \
    !defined(EPILOGUE) || !defined(LOCAL_SIZE) || !defined(STATE_N_TOKENS)
#error "portable/linear_decode_quantized.cl needs the build constants WEIGHT, K, N, N_TILES, NORM, EPS, EPILOGUE, LOCAL_SIZE and those of the step state"
#endif
#include "common/tiles.cl"

#define TILES_AT_ONCE (EPILOGUE == EPILOGUE_SWIGLU ? 2 : 1)

// Work-items 0 .. width - 1 end with the sums over the work-items that are equal modulo width.
inline float reduce(float v, __local float* scratch, int lid, int width) {
    scratch[lid] = v;
    for (int n = LOCAL_SIZE / 2; n >= width; n /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < n) scratch[lid] += scratch[lid + n];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    v = scratch[lid % width];
    barrier(CLK_LOCAL_MEM_FENCE);
    return v;
}

inline float dot_tile(__global const uchar* w, __global const float* x, __global const float* norm, int lid) {
    const int row = lid % 16;
    float sum = 0.0f;
    for (int g = lid / 16; g < K / 32; g += LOCAL_SIZE / 16) {
        for (int k = 32 * g; k < 32 * g + 32; k += 4) {
            float4 v = vload4(0, x + k);
#if NORM
            v *= vload4(0, norm + k);
#endif
            sum += dot(weights4_at(w, k, row), v);
        }
    }
    return sum;
}

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void linear_decode(__global const uchar* weight, __global const float* x, __global const float* norm,
                   __global float* out, __global const int* state, const int out_row) {
    __local float scratch[LOCAL_SIZE];
    const int lid = get_local_id(0), unit = get_group_id(0);
    __global const uchar* w = weight + unit * TILES_AT_ONCE * TILE_SIZE;
    x += (size_t)(state[STATE_N_TOKENS] - 1) * K;
    float scale = 1.0f;
#if NORM
    float squares = 0.0f;
    for (int k = lid; k < K; k += LOCAL_SIZE) squares += x[k] * x[k];
    squares = reduce(squares, scratch, lid, 1);
    scale = 1.0f / sqrt(NO_OVERFLOW(squares) / K + EPS);
#endif
    float y = reduce(dot_tile(w, x, norm, lid), scratch, lid, 16) * scale;
#if EPILOGUE == EPILOGUE_SWIGLU
    const float up = reduce(dot_tile(w + TILE_SIZE, x, norm, lid), scratch, lid, 16) * scale;
    y = GATE_VALUE(y, exp) * up;
#endif
    const int row = unit * 16 + lid;
    if (lid >= 16 || row >= N) return;
#if EPILOGUE == EPILOGUE_ADD
    y += out[out_row + row];
#endif
    out[out_row + row] = y;
}

// y = W x for one token on NVIDIA GPUs: WARPS warps share the columns of a 16-row tile (of two tiles with SWIGLU).
// Formula, arguments and build constants as in cpu/linear_decode.cl, and
//   WARPS   warps of a work-group; each takes every WARPS-th run of 16 columns
//   UNROLL  16-byte loads of a work-item in flight; 16 UNROLL columns a turn, the rest one run at a time
//
// A warp reads 16 columns of a tile, 512 consecutive bytes, 16 a lane: 8 rows of one column, as in the portable form.
// The squares of x for the norm are summed on the way: each column is met once in a group.
//
//     lane:        0        1        2        3      ...      31        tile memory, 16 values a column k:
//     column k:    0        0        1        1               15       [ rows 0-7 | rows 8-15 ] [ rows 0-7 | ...
//     rows:       0-7     8-15      0-7     8-15             8-15
//
// Index space: one work-group a unit of tiles. Local memory: 4 * 17 * WARPS * tiles bytes.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(NORM) || !defined(EPS) || \
    !defined(EPILOGUE) || !defined(WARPS) || !defined(UNROLL) || !defined(STATE_N_TOKENS)
#error "nvidia/linear_decode.cl needs the build constants WEIGHT, K, N, N_TILES, NORM, EPS, EPILOGUE, WARPS, UNROLL and those of the step state"
#endif
#include "common.cl"
#include "nvidia/ptx.cl"

#define TILES (EPILOGUE == EPILOGUE_SWIGLU ? 2 : 1)
#define RUN 16  // columns that a warp reads at once

inline void multiply(float acc[8], const uint4 w, const float x) {
    const uint words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 v = CAT(widen_, WEIGHT)(words[i]);
        acc[2 * i] += v.x * x;
        acc[2 * i + 1] += v.y * x;
    }
}

__kernel __attribute__((reqd_work_group_size(WARP * WARPS, 1, 1)))
void linear_decode(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global const float* norm,
                   __global float* out, __global const int* state, const int out_row) {
    __local float rows[TILES][WARPS][16];
    __local float squares[WARPS];
    const int lane = get_local_id(0) % WARP, warp = get_local_id(0) / WARP, unit = get_group_id(0);
    __global const CAT(WEIGHT, _t)* w = weight + (size_t)unit * TILES * K * 16 + lane * 8;
    x += (size_t)(state[STATE_N_TOKENS] - 1) * K + lane / 2;
    norm += lane / 2;

    float acc[TILES][8], square = 0.0f;
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[t][i] = 0.0f;
    int k = warp * RUN;
    for (; k + (UNROLL - 1) * WARPS * RUN < K; k += UNROLL * WARPS * RUN) {
        uint4 loaded[TILES][UNROLL];
        float v[UNROLL];
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) loaded[t][u] = stream16(w + ((size_t)t * K + k + u * WARPS * RUN) * 16);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            v[u] = x[k + u * WARPS * RUN];
#if NORM
            square += v[u] * v[u];
            v[u] *= norm[k + u * WARPS * RUN];
#endif
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
#pragma unroll
            for (int t = 0; t < TILES; ++t) multiply(acc[t], loaded[t][u], v[u]);
    }
    for (; k < K; k += WARPS * RUN) {
        float v = x[k];
#if NORM
        square += v * v;
        v *= norm[k];
#endif
#pragma unroll
        for (int t = 0; t < TILES; ++t) multiply(acc[t], stream16(w + ((size_t)t * K + k) * 16), v);
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        const float sum = sum8(acc[t], lane);
        if (!(lane & 2)) rows[t][warp][(lane & 1) * 8 + sum8_index(lane)] = sum;
    }
#if NORM
    square = warp_sum(square);
    if (lane == 0) squares[warp] = 0.5f * square;  // both parities met every column
#endif
    barrier(CLK_LOCAL_MEM_FENCE);
    if (get_local_id(0) >= 16) return;
    float y[TILES], scale = 1.0f;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        y[t] = 0.0f;
        for (int i = 0; i < WARPS; ++i) y[t] += rows[t][i][lane];
    }
#if NORM
    float sum = 0.0f;
    for (int i = 0; i < WARPS; ++i) sum += squares[i];
    scale = 1.0f / sqrt(sum / K + EPS);
#endif
    float value = y[0] * scale;
#if EPILOGUE == EPILOGUE_SWIGLU
    value = GATE_VALUE(value, exp) * (y[1] * scale);
#endif
    const int row = unit * 16 + lane;
    if (row >= N) return;
#if EPILOGUE == EPILOGUE_ADD
    value += out[out_row + row];
#endif
    out[out_row + row] = value;
}

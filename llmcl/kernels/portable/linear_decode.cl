// y = W x for one token on any device: one work-group a 16-row tile (two tiles with SWIGLU), its work-items share K.
// Formula, arguments and build constants as in cpu/linear_decode.cl, and
//   LOCAL_SIZE  work-items of a group, a power of two >= 2
//
//     work-item:   0        1        2        3      ...        tile memory, 16 values a column k:
//     column k:    0        0        1        1                 [ rows 0-7 | rows 8-15 ] [ rows 0-7 | ...
//     rows:       0-7     8-15      0-7     8-15                neighbours read neighbouring 8 values
//
// Local memory: 36 LOCAL_SIZE bytes.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(NORM) || !defined(EPS) || \
    !defined(EPILOGUE) || !defined(LOCAL_SIZE) || !defined(STATE_N_TOKENS)
#error "portable/linear_decode.cl needs the build constants WEIGHT, K, N, N_TILES, NORM, EPS, EPILOGUE, LOCAL_SIZE and those of the step state"
#endif
#include "common/common.cl"
#include "common/reduce.cl"

#define TILES_AT_ONCE (EPILOGUE == EPILOGUE_SWIGLU ? 2 : 1)
#define STRIDE (LOCAL_SIZE / 2)

// Sums 8 rows over the work-items of equal parity; work-items 0 and 1 end with rows 0-7 and 8-15.
inline float8 reduce_rows(float8 v, __local float* scratch, int lid) {
    vstore8(v, lid, scratch);
    for (int width = LOCAL_SIZE / 2; width > 1; width /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < width) vstore8(vload8(lid, scratch) + vload8(lid + width, scratch), lid, scratch);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    v = vload8(lid & 1, scratch);
    barrier(CLK_LOCAL_MEM_FENCE);
    return v;
}

inline float8 dot_tile(__global const CAT(WEIGHT, _t)* w, __global const float* x, __global const float* norm, int lid) {
    float8 sum = 0;
    w += (lid & 1) * 8;
#pragma unroll 4
    for (int k = lid / 2; k < K; k += STRIDE) {
#if NORM
        const float v = x[k] * norm[k];
#else
        const float v = x[k];
#endif
        sum += CAT(load8_, WEIGHT)(w + (size_t)k * 16) * v;
    }
    return sum;
}

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void linear_decode(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global const float* norm,
                   __global float* out, __global const int* state, const int out_row) {
    __local float scratch[LOCAL_SIZE * 8];
    const int lid = get_local_id(0), unit = get_group_id(0);
    __global const CAT(WEIGHT, _t)* w = weight + (size_t)unit * TILES_AT_ONCE * K * 16;
    x += (size_t)(state[STATE_N_TOKENS] - 1) * K;
    float scale = 1.0f;
#if NORM
    LOCAL_SCRATCH(float, partial);
    float squares = 0.0f;
    for (int k = lid; k < K; k += LOCAL_SIZE) squares += x[k] * x[k];
    squares = reduce_sum(squares, partial, lid);
    scale = 1.0f / sqrt(NO_OVERFLOW(squares) / K + EPS);
#endif
    float8 y = reduce_rows(dot_tile(w, x, norm, lid), scratch, lid) * scale;
#if EPILOGUE == EPILOGUE_SWIGLU
    const float8 up = reduce_rows(dot_tile(w + K * 16, x, norm, lid), scratch, lid) * scale;
    y = GATE_VALUE(y, exp) * up;
#endif
    if (lid >= 2) return;
    float rows[8];
    vstore8(y, 0, rows);
    for (int i = 0; i < 8; ++i) {
        const int row = unit * 16 + lid * 8 + i;
        if (row >= N) return;
#if EPILOGUE == EPILOGUE_ADD
        rows[i] += out[out_row + row];
#endif
        out[out_row + row] = rows[i];
    }
}

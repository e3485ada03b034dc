// y = W x for one token on NVIDIA GPUs: WARPS warps share the columns of a 16-row tile (two tiles with SWIGLU),
// see nvidia/product.cl.
// Formula, arguments and build constants as in cpu/linear_decode.cl, and
//   WARPS   warps per work-group
//
// Index space: a work-group per unit of tiles. Local memory: 4 K + 264 WARPS bytes.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(NORM) || !defined(EPS) || \
    !defined(EPILOGUE) || !defined(WARPS) || !defined(STATE_N_TOKENS)
#error "nvidia/linear_decode.cl needs the build constants WEIGHT, K, N, N_TILES, NORM, EPS, EPILOGUE, WARPS and those of the step state"
#endif
#define MAX_COLUMNS K
#include "nvidia/product.cl"

__kernel __attribute__((reqd_work_group_size(WARP * WARPS, 1, 1)))
void linear_decode(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global const float* norm,
                   __global float* out, __global const int* state, const int out_row) {
    __local float __attribute__((aligned(16))) columns_of[WARPS][COLUMN_FLOATS];
    __local float __attribute__((aligned(16))) sums[SUM_FLOATS];
    __local float* columns = columns_of[get_local_id(0) / WARP];
    const int unit = get_group_id(0);
    const matrix whole = {weight, K, unit + 1, unit, 1, EPILOGUE == EPILOGUE_SWIGLU, 0, 0, K};
    const matrix none = {weight, K, 0, 0, 1, false, 0, 0, K};
    const target to = {out + out_row, 0, 0, 0, false, EPILOGUE == EPILOGUE_ADD, 0};
    int parity = 0;
    weight_fragment fragment;
    x += (size_t)(state[STATE_N_TOKENS] - 1) * K;
    receive(&fragment, &whole, x, 0, false, norm, NORM, 0, columns, sums);
    product(&whole, &none, &to, N, NORM, columns, sums, &parity, &fragment);
}

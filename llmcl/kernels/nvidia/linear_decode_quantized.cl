// y = W x for one token on NVIDIA GPUs, for quantised weights, see nvidia/product_quantized.cl.
// Formula, arguments and build constants as in cpu/linear_decode.cl (with DOT 0 or 1), and
//   WARPS     warps per work-group
//   N_GROUPS  work-groups; each takes every N_GROUPS-th unit, so that the token's activations are staged once for many units
//
// Index space: N_GROUPS groups with 32 WARPS work-items. Local memory: 2 KB per warp, plus 1.125 K bytes with DOT, otherwise 4 K.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(NORM) || !defined(EPS) || \
    !defined(EPILOGUE) || !defined(DOT) || !defined(WARPS) || !defined(N_GROUPS) || !defined(STATE_N_TOKENS)
#error "nvidia/linear_decode_quantized.cl needs the build constants named in its head and those of the step state"
#endif
#define MAX_COLUMNS K
#include "nvidia/product_quantized.cl"

#define GATED (EPILOGUE == EPILOGUE_SWIGLU)

__kernel __attribute__((reqd_work_group_size(WARP * WARPS, 1, 1)))
void linear_decode(__global const uchar* weight, __global const float* x, __global const float* norm,
                   __global float* out, __global const int* state, const int out_row) {
    __local float __attribute__((aligned(16))) columns_of[WARPS][COLUMN_FLOATS];
    __local float __attribute__((aligned(16))) sums[SUM_FLOATS];
    __local float* columns = columns_of[get_local_id(0) / WARP];
    const matrix whole = {weight, K, N_TILES / (GATED ? 2 : 1), get_group_id(0), N_GROUPS, GATED, 0, 0, K};
    const matrix none = {weight, K, 0, 0, 1, false, 0, 0, K};
    const target to = {out + out_row, 0, 0, 0, false, EPILOGUE == EPILOGUE_ADD, 0};
    int parity = 0;
    weight_fragment fragment;
    load_early(&fragment, &whole);
    receive(&fragment, &whole, x + (size_t)(state[STATE_N_TOKENS] - 1) * K, 0, false, norm, NORM, 0, columns, sums);
    product(&whole, &none, &to, N, NORM, columns, sums, &parity, &fragment);
}

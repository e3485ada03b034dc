// y = W x for one token on NVIDIA GPUs: WARPS warps share the columns of a 16-row tile (of two tiles with SWIGLU), as
// nvidia/product.cl says.
// Formula, arguments and build constants as in cpu/linear_decode.cl, and
//   WARPS   warps of a work-group
//   UNROLL  16-byte loads of a work-item in flight
//
// Index space: one work-group a unit of tiles. Local memory: 264 WARPS bytes.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(NORM) || !defined(EPS) || \
    !defined(EPILOGUE) || !defined(WARPS) || !defined(UNROLL) || !defined(STATE_N_TOKENS)
#error "nvidia/linear_decode.cl needs the build constants WEIGHT, K, N, N_TILES, NORM, EPS, EPILOGUE, WARPS, UNROLL and those of the step state"
#endif
#include "nvidia/product.cl"

__kernel __attribute__((reqd_work_group_size(WARP * WARPS, 1, 1)))
void linear_decode(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global const float* norm,
                   __global float* out, __global const int* state, const int out_row) {
    __local float scratch[PRODUCT_FLOATS(WARPS)];
    const int unit = get_group_id(0);
    weight_turn turn;
    product(weight, x + (size_t)(state[STATE_N_TOKENS] - 1) * K, norm, out + out_row, K, N, EPILOGUE == EPILOGUE_SWIGLU, NORM,
            EPILOGUE == EPILOGUE_ADD, unit + 1, unit, 1, WARPS, get_local_id(0) / WARP, 1,
            &turn, false, scratch);
}

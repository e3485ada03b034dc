// y = W x for one token on NVIDIA GPUs, quantised weights, as nvidia/product_quantized.cl says.
// Formula, arguments and build constants as in cpu/linear_decode.cl (with DOT 0 or 1), and
//   WARPS     16, of a work-group
//   TEAM      warps that share a unit, a divisor of WARPS of 2 or more
//   N_GROUPS  work-groups; each takes every N_GROUPS-th unit, so that a token's activations are staged once for many
//
// Index space: N_GROUPS groups of 32 WARPS. Local memory: 16.1 KB, and with DOT 1.125 K bytes.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(NORM) || !defined(EPS) || \
    !defined(EPILOGUE) || !defined(DOT) || !defined(WARPS) || !defined(TEAM) || !defined(N_GROUPS) || !defined(STATE_N_TOKENS)
#error "nvidia/linear_decode_quantized.cl needs the build constants named in its head and those of the step state"
#endif
#include "nvidia/product_quantized.cl"

#define GATED (EPILOGUE == EPILOGUE_SWIGLU)

__kernel __attribute__((reqd_work_group_size(WARP * WARPS, 1, 1)))
void linear_decode(__global const uchar* weight, __global const float* x, __global const float* norm,
                   __global float* out, __global const int* state, const int out_row) {
    __local float __attribute__((aligned(16))) scratch[PRODUCT_FLOATS(K)];
    const int warp = get_local_id(0) / WARP, team = warp / TEAM, member = warp % TEAM;
    const int units = N_TILES / (GATED ? 2 : 1), first_unit = get_group_id(0) + team * N_GROUPS;
    weight_turn turn;
    load_turn(&turn, weight, K, GATED, units, first_unit, N_GROUPS * (WARPS / TEAM), TEAM, member);
    product(weight, x + (size_t)(state[STATE_N_TOKENS] - 1) * K, norm, out + out_row, K, N, GATED, NORM,
            EPILOGUE == EPILOGUE_ADD, units, first_unit, N_GROUPS * (WARPS / TEAM), TEAM, member, 1 + team, &turn, scratch);
}

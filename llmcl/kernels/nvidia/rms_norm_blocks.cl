// rms_norm (rms_norm.cl) with output for a product on Hopper's matrix units: 16 bits, in blocks of 8 x 8.
//
// x  float [n][HIDDEN]    weight  float [HIDDEN]    out  OUT [ceil(n/8)][HIDDEN/8][8][8], tokens from n on repeat the last
// Index space: a work-group with 256 work-items per 8 tokens; first a warp sums a token's squares, then a work-item writes 8
// columns of a token at a time, 8 neighbours a block.
// Build: OUT (f16 or bf16), HIDDEN (a multiple of 8), EPS. Local memory: 32 bytes.
#if !defined(OUT) || !defined(HIDDEN) || !defined(EPS) || !defined(STATE_N_TOKENS)
#error "nvidia/rms_norm_blocks.cl needs the build constants OUT, HIDDEN, EPS and those of the step state"
#endif
#include "common/common.cl"
#include "nvidia/ptx.cl"

#define GROUP_ITEMS 256

__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1)))
void rms_norm(__global const float* x, __global const float* weight, __global uint4* out, __global const int* state) {
    __local float scales[8];
    const int lid = get_local_id(0), lane = lid % WARP, warp = lid / WARP;
    const int first = get_group_id(0) * 8, last = state[STATE_N_TOKENS] - 1;

    __global const float* mine = x + (size_t)min(first + warp, last) * HIDDEN;
    float sum = 0.0f;
    for (int i = lane; i < HIDDEN / 8; i += WARP) {
        const float8 v = vload8(i, mine), squares = v * v;
        const float4 half_sum = squares.lo + squares.hi;
        sum += half_sum.x + half_sum.y + half_sum.z + half_sum.w;
    }
    sum = warp_sum(sum);
    if (lane == 0) scales[warp] = 1.0f / sqrt(NO_OVERFLOW(sum) / HIDDEN + EPS);
    barrier(CLK_LOCAL_MEM_FENCE);

    const float scale = scales[lid % 8];
    x += (size_t)min(first + lid % 8, last) * HIDDEN;
    out += (size_t)get_group_id(0) * HIDDEN;
    for (int piece = lid; piece < HIDDEN; piece += GROUP_ITEMS) {
        const float8 v = vload8(piece / 8, x) * scale * vload8(piece / 8, weight);
        out[piece] = (uint4)(CAT(narrow_, OUT)(v.s0, v.s1), CAT(narrow_, OUT)(v.s2, v.s3), CAT(narrow_, OUT)(v.s4, v.s5),
                             CAT(narrow_, OUT)(v.s6, v.s7));
    }
}

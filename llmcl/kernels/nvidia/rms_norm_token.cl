// rms_norm_blocks.cl for the tokens of a small step: a work-group a token, which it reads once.
//
// x  float [n][HIDDEN]    weight  float [HIDDEN]    out  OUT [ceil(n/8)][HIDDEN/8][8][8], tokens from n on are not written
// Index space: n work-groups of 256; a work-item has every 256th run of 8 columns.
// Build: OUT (f16 or bf16), HIDDEN (a multiple of 8), EPS. Local memory: 32 bytes.
#if !defined(OUT) || !defined(HIDDEN) || !defined(EPS)
#error "nvidia/rms_norm_token.cl needs the build constants OUT, HIDDEN and EPS"
#endif
#include "common/common.cl"
#include "nvidia/ptx.cl"

#define GROUP_ITEMS 256
#define RUNS (HIDDEN / 8)
#define RUNS_EACH ((RUNS + GROUP_ITEMS - 1) / GROUP_ITEMS)

__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1)))
void rms_norm(__global const float* x, __global const float* weight, __global uint4* out, __global const int* state) {
    __local float sums[GROUP_ITEMS / WARP];
    const int lid = get_local_id(0), token = get_group_id(0);
    x += (size_t)token * HIDDEN;
    float8 v[RUNS_EACH], w[RUNS_EACH];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < RUNS_EACH; ++i) {
        const int run = lid + i * GROUP_ITEMS;
        v[i] = RUNS % GROUP_ITEMS == 0 || run < RUNS ? vload8(run, x) : 0.0f;
        w[i] = RUNS % GROUP_ITEMS == 0 || run < RUNS ? vload8(run, weight) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < RUNS_EACH; ++i) {
        const float8 squares = v[i] * v[i];
        const float4 half_sum = squares.lo + squares.hi;
        sum += half_sum.x + half_sum.y + half_sum.z + half_sum.w;
    }
    sum = warp_sum(sum);
    if (lid % WARP == 0) sums[lid / WARP] = sum;
    barrier(CLK_LOCAL_MEM_FENCE);
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < GROUP_ITEMS / WARP; ++i) sum += sums[i];
    const float scale = 1.0f / sqrt(NO_OVERFLOW(sum) / HIDDEN + EPS);
    out += (size_t)(token / 8) * HIDDEN + token % 8;
#pragma unroll
    for (int i = 0; i < RUNS_EACH; ++i) {
        const int run = lid + i * GROUP_ITEMS;
        const float8 y = v[i] * scale * w[i];
        if (RUNS % GROUP_ITEMS == 0 || run < RUNS)
            out[run * 8] = (uint4)(CAT(narrow_, OUT)(y.s0, y.s1), CAT(narrow_, OUT)(y.s2, y.s3),
                                   CAT(narrow_, OUT)(y.s4, y.s5), CAT(narrow_, OUT)(y.s6, y.s7));
    }
}

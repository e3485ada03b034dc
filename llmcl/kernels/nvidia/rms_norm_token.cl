// rms_norm_blocks.cl for the tokens of a small step: a work-group per token, which reads the token once.
//
// x  float [n][HIDDEN]    weight  float [HIDDEN]    out  OUT [ceil(n/8)][HIDDEN/8][8][8], tokens from n on are not written
// Index space: n work-groups with GROUP_ITEMS work-items; a work-item has every GROUP_ITEMS-th run of 8 columns. With CHAINED the
// file is the function `rms_norm_unit` in nvidia/few_rows_chain.cl, and other groups in the launch have written x. The following
// options first add to x: PARTS (0) adds parts float [PARTS][MAX_ROWS][HIDDEN], or [MAX_ROWS][PARTS][HIDDEN] with PARTS_OF_TOKEN.
// HAS_ADDED adds added float [HIDDEN]. NORMS_PART adds the RMS norm of a single part, with weights `added`. With HAS_ROWS the
// normalised values also go to rows float [n][HIDDEN].
// Build: OUT (f16 or bf16), HIDDEN (a multiple of 8), EPS, GROUP_ITEMS (256). Local memory: 4 bytes per warp.
#if !defined(OUT) || !defined(HIDDEN) || !defined(EPS)
#error "nvidia/rms_norm_token.cl needs the build constants OUT, HIDDEN and EPS"
#endif
#include "common/common.cl"
#include "nvidia/ptx.cl"

#ifndef CHAINED
#define CHAINED 0
#endif
#ifndef GROUP_ITEMS
#define GROUP_ITEMS 256
#endif
#if CHAINED
#define LOAD8(run, x) load_shared_float8((x) + (run) * 8)
#else
#define LOAD8(run, x) vload8(run, x)
#endif
#ifndef PARTS
#define PARTS 0
#define MAX_ROWS 0
#endif
#ifndef PARTS_OF_TOKEN
#define PARTS_OF_TOKEN 0
#endif
#ifndef HAS_ADDED
#define HAS_ADDED 0
#endif
#ifndef HAS_ROWS
#define HAS_ROWS 0
#endif
#ifndef NORMS_PART
#define NORMS_PART 0
#endif
#define PARTS_AT_ONCE 4
#define RUNS (HIDDEN / 8)
#define RUNS_EACH ((RUNS + GROUP_ITEMS - 1) / GROUP_ITEMS)

// Returns 1 / the root of the mean square over all values in the group. sums: [GROUP_ITEMS / WARP].
inline float group_scale(const float8 v[RUNS_EACH], __local float* sums) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < RUNS_EACH; ++i) {
        const float8 squares = v[i] * v[i];
        const float4 half_sum = squares.lo + squares.hi;
        sum += half_sum.x + half_sum.y + half_sum.z + half_sum.w;
    }
    sum = warp_sum(sum);
    if (get_local_id(0) % WARP == 0) sums[get_local_id(0) / WARP] = sum;
    barrier(CLK_LOCAL_MEM_FENCE);
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < GROUP_ITEMS / WARP; ++i) sum += sums[i];
    return 1.0f / sqrt(NO_OVERFLOW(sum) / HIDDEN + EPS);
}

// The work of a token's group. sums: [GROUP_ITEMS / WARP]. done, count: see few_rows_unit in nvidia/linear_few_rows.cl.
inline void rms_norm_unit(const int token, __local float* sums, volatile __global const uint* done, const uint count,
                          __global float* x, __global const float* weight, __global uint4* out, __global const int* state,
                          __global const float* parts, __global const float* added, __global float* rows) {
    const int lid = get_local_id(0);
#if CHAINED
    if (token >= state[STATE_N_TOKENS]) return;  // the launch has groups for the maximum row count
#endif
    x += (size_t)token * HIDDEN;
    float8 v[RUNS_EACH], w[RUNS_EACH];
#if NORMS_PART
    float8 part[RUNS_EACH], factor[RUNS_EACH];
#endif
#pragma unroll
    for (int i = 0; i < RUNS_EACH; ++i) {
        const int run = lid + i * GROUP_ITEMS;
        w[i] = RUNS % GROUP_ITEMS == 0 || run < RUNS ? vload8(run, weight) : 0.0f;
    }
#if CHAINED
    wait_until(done, count);
#endif
#pragma unroll
    for (int i = 0; i < RUNS_EACH; ++i) {
        const int run = lid + i * GROUP_ITEMS;
        const bool there = RUNS % GROUP_ITEMS == 0 || run < RUNS;
        v[i] = there ? LOAD8(run, x) : 0.0f;
#if NORMS_PART
        part[i] = there ? LOAD8(run, parts + (size_t)token * HIDDEN) : 0.0f;
        factor[i] = there ? vload8(run, added) : 0.0f;
    }
    const float part_scale = group_scale(part, sums);
    barrier(CLK_LOCAL_MEM_FENCE);  // all work-items have read the sums
#pragma unroll
    for (int i = 0; i < RUNS_EACH; ++i) {
        const int run = lid + i * GROUP_ITEMS;
        const bool there = RUNS % GROUP_ITEMS == 0 || run < RUNS;
        v[i] += part[i] * part_scale * factor[i];
#endif
        if (HAS_ADDED && there) v[i] += vload8(run, added);
#pragma unroll PARTS_AT_ONCE
        for (int p = 0; p < PARTS; ++p) {
            const size_t row = PARTS_OF_TOKEN ? token * PARTS + p : p * MAX_ROWS + token;
            v[i] += there ? LOAD8(run, parts + row * HIDDEN) : 0.0f;
        }
        if ((PARTS > 0 || HAS_ADDED || NORMS_PART) && there) vstore8(v[i], run, x);
    }
    const float scale = group_scale(v, sums);
    out += (size_t)(token / 8) * HIDDEN + token % 8;
#pragma unroll
    for (int i = 0; i < RUNS_EACH; ++i) {
        const int run = lid + i * GROUP_ITEMS;
        const float8 y = v[i] * scale * w[i];
        if (HAS_ROWS && (RUNS % GROUP_ITEMS == 0 || run < RUNS)) vstore8(y, run, rows + (size_t)token * HIDDEN);
        if (RUNS % GROUP_ITEMS == 0 || run < RUNS)
            out[run * 8] = (uint4)(CAT(narrow_, OUT)(y.s0, y.s1), CAT(narrow_, OUT)(y.s2, y.s3),
                                   CAT(narrow_, OUT)(y.s4, y.s5), CAT(narrow_, OUT)(y.s6, y.s7));
    }
}

#if !CHAINED
__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1)))
void rms_norm(__global float* x, __global const float* weight, __global uint4* out, __global const int* state) {
    __local float sums[GROUP_ITEMS / WARP];
    rms_norm_unit(get_group_id(0), sums, 0, 0, x, weight, out, state, 0, 0, 0);
}
#endif

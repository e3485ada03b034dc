// qkv_adjust (portable/qkv_adjust.cl: formula and arguments) as a link in nvidia/few_rows_chain.cl: each warp handles a head, and
// qkv was written by other groups in the same launch. Rows past the step's last row may hold anything, before and after.
//
// Build: N_Q_HEADS, N_KV_HEADS, HEAD_DIM (a multiple of 32), BIAS, HEAD_NORM, EPS, HEADS (heads to adjust, from the row's first
// head on), WARPS.
#if !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(HEAD_DIM) || !defined(BIAS) || !defined(HEAD_NORM) || \
    !defined(EPS) || !defined(HEADS) || !defined(WARPS)
#error "nvidia/adjust_heads.cl needs the build constants N_Q_HEADS, N_KV_HEADS, HEAD_DIM, BIAS, HEAD_NORM, EPS, HEADS and WARPS"
#endif
#include "common/common.cl"
#include "nvidia/ptx.cl"

#define EACH (HEAD_DIM / WARP)  // values per lane, every 32nd

// The work of a group: WARPS heads in a row. done, count: see few_rows_unit in nvidia/linear_few_rows.cl.
inline void adjust_heads_unit(const int part, const int row, volatile __global const uint* done, const uint count,
                              __global float* qkv, __global const float* bias, __global const float* norms) {
    const int lane = get_local_id(0) % WARP, head = part * WARPS + get_local_id(0) / WARP;
    const bool has_norm = HEAD_NORM && head < N_Q_HEADS + N_KV_HEADS;
    float add[EACH], weight[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int dim = i * WARP + lane;
        add[i] = BIAS && head < HEADS ? bias[head * HEAD_DIM + dim] : 0.0f;
        weight[i] = has_norm ? norms[(head < N_Q_HEADS ? 0 : HEAD_DIM) + dim] : 1.0f;
    }
    wait_until(done, count);
    if (head >= HEADS) return;
    __global float* x = qkv + ((size_t)row * (N_Q_HEADS + 2 * N_KV_HEADS) + head) * HEAD_DIM + lane;
    float v[EACH], square = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) v[i] = load_shared_float(x + i * WARP);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        v[i] += add[i];
        square += v[i] * v[i];
    }
    const float scale = has_norm ? 1.0f / sqrt(NO_OVERFLOW(warp_sum(square)) / HEAD_DIM + EPS) : 1.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) x[i * WARP] = v[i] * scale * weight[i];
}

// A router's product as a link in nvidia/few_rows_chain.cl: logits = W x for the few tokens of a step, in float32.
//
//   parts[p][t][r] = sum W[r][k] x[t][k] over the columns of part p: the logit is the sum over the parts
//
// weight  f32, f16 or bf16 tiles [K][16]     x  float [n][K], written by other groups in the launch
// parts   float [PARTS][MAX_ROWS][16 ceil(N / 16)]
//
// A group has a tile and a part of the columns. A warp takes every WARPS-th run of 8 columns, and requests the weights before x has
// arrived. A lane has four rows of a column:
//
//     lane:        0     1     2     3     4    ...    31
//     column:      0     0     0     0     1            7
//     rows:       0-3   4-7   8-11 12-15  0-3        12-15
//
// Build: WEIGHT, K (a multiple of 8), N, MAX_ROWS, PARTS, WARPS. Local memory: 256 WARPS bytes.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(MAX_ROWS) || !defined(PARTS) || !defined(WARPS)
#error "nvidia/router_few_rows.cl needs the build constants WEIGHT, K, N, MAX_ROWS, PARTS and WARPS"
#endif
#include "common/tiles.cl"
#include "nvidia/ptx.cl"

#define TILES ((N + 15) / 16)
#define RUNS (K / 8)
#define PART_RUNS ((RUNS + PARTS - 1) / PARTS)
#define EACH ((PART_RUNS + WARPS - 1) / WARPS)

// Four rows of a column.
inline float4 four_weights(__global const CAT(WEIGHT, _t)* p) {
#if WEIGHT_IS(f32)
    return as_float4(load16_words(p));
#else
    const uint2 words = load8_words(p);
    return (float4)(CAT(widen_, WEIGHT)(words.x), CAT(widen_, WEIGHT)(words.y));
#endif
}

inline float4 shuffle_xor4(const float4 v, const int mask) {
    return (float4)(shuffle_xor(v.x, mask), shuffle_xor(v.y, mask), shuffle_xor(v.z, mask), shuffle_xor(v.w, mask));
}

// The work of a group: a tile and a part. sums: [WARPS][4][16]. done, count: see few_rows_unit in nvidia/linear_few_rows.cl.
inline void router_unit(const int tile, const int part, __local float* sums, volatile __global const uint* done, const uint count,
                        __global const CAT(WEIGHT, _t)* weight, __global const float* x, __global float* parts,
                        __global const int* state) {
    const int item = get_local_id(0), lane = item % WARP, warp = item / WARP, n = state[STATE_N_TOKENS];
    const int last_run = min((part + 1) * PART_RUNS, RUNS);
    float4 w[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int run = part * PART_RUNS + i * WARPS + warp;
        const int column = min(run, RUNS - 1) * 8 + lane / 4;
        const float4 found = four_weights(weight + ((size_t)tile * K + column) * 16 + lane % 4 * 4);
        w[i] = run < last_run ? found : 0.0f;
    }
    wait_until(done, count);
    for (int first = 0; first < n; first += 4) {
        float4 acc[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) acc[t] = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int run = min(part * PART_RUNS + i * WARPS + warp, RUNS - 1);
#pragma unroll
            for (int t = 0; t < 4; ++t)
                acc[t] += w[i] * load_shared_float(x + (size_t)min(first + t, n - 1) * K + run * 8 + lane / 4);
        }
        // The lanes' sums for a column become sums for a token: each step halves a lane's tokens.
#pragma unroll
        for (int step = 2; step > 0; step /= 2) {
            const bool upper = lane & step * 8;
#pragma unroll
            for (int t = 0; t < step; ++t) {
                const float4 kept = upper ? acc[t + step] : acc[t], given = upper ? acc[t] : acc[t + step];
                acc[t] = kept + shuffle_xor4(given, step * 8);
            }
        }
        acc[0] += shuffle_xor4(acc[0], 4);
        barrier(CLK_LOCAL_MEM_FENCE);  // the previous tokens' sums have been read
        if (lane % 8 < 4) vstore4(acc[0], 0, sums + (warp * 4 + lane / 8) * 16 + lane % 4 * 4);
        barrier(CLK_LOCAL_MEM_FENCE);
        const int token = first + item / 16;
        if (item < 64 && token < n) {
            float y = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) y += sums[i * 64 + item];
            parts[((size_t)part * MAX_ROWS + token) * (16 * TILES) + tile * 16 + item % 16] = y;
        }
    }
}

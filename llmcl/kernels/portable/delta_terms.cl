// The part of the gated delta rule within a chunk that doesn't depend on the state (Yang et al., "Parallelizing Linear Transformers with
// the Delta Rule", 2024, and "Gated Delta Networks", 2024: the WY form). For each value head, with
// r[t][s] = decay[s + 1] ... decay[t] and g[t] = decay[chunk's first] ... decay[t]:
//
//   A[t][s] = rate[t] r[t][s] (k[t] . k[s])  for s < t
//   w = (1 + A)^-1 (rate g k)      u = (1 + A)^-1 (rate v)      b[t][s] = r[t][s] (q[t] . k[s])  for s <= t, else 0
//   factors[t] = g[t], r[chunk's last][t]
//
// delta_chunks.cl uses them for the rest. For Mamba-2's scan (without CORRECTS, see delta_rule.cl) u = rate v, and there is no w.
//
// qkv      float [n][2 N_K D_K + N_V D_V]: q and k for N_K heads, v for N_V      gates  float [n][N_V][2]: decay, rate
// state    int, see STATE_*, holds n. Chunks are cut so that a snapshot (conv_state.cl) falls between two chunks: the first may be
//          shorter
// w        float [n][N_V][D_K]     u        float [n][N_V][D_V]
// b        float [n][N_V][CHUNK]   factors  float [n][N_V][2]
//
// Index space: groups (ceil(n / CHUNK), N_V), local size LOCAL_SIZE. First the products of keys and queries with keys, SLICE columns at
// a time: a work-item has 4 tokens and 2 keys. Then one work-item per key multiplies by the decays, token by token. Then each work-item
// solves for a column of w and a column of u, token by token: the remaining terms stay in registers, the next token's in the first.
// Build: CORRECTS, N_K, N_V, D_K, D_V (multiples of 16), CHUNK (a multiple of 4), SLICE (divides D_K, a multiple of 4), LOCAL_SIZE (CHUNK CHUNK / 8,
// at least 2 CHUNK + 1), HEADS_IN_TURN (see delta_rule.cl), step state constants.
// Local memory: 4 CHUNK (2 SLICE + 2 CHUNK + 19) bytes.
#if !defined(N_K) || !defined(N_V) || !defined(D_K) || !defined(D_V) || !defined(CHUNK) || !defined(LOCAL_SIZE) || \
    !defined(SLICE) || !defined(HEADS_IN_TURN) || !defined(STATE_N_TOKENS) || !defined(STATE_SNAPSHOT)
#error "delta_terms.cl needs N_K, N_V, D_K, D_V, CHUNK, SLICE, LOCAL_SIZE, HEADS_IN_TURN, STATE_N_TOKENS, STATE_SNAPSHOT"
#endif
#include "common/common.cl"
#include "common/delta_row.cl"

#define SLICE_PITCH (SLICE + 4)  // spreads neighbouring keys' rows over banks, aligned to float4
#define PITCH (CHUNK + 4)
#define KEYS (CHUNK / 2)  // a work-item's keys: s and s + KEYS
#define UNROLL _Pragma("unroll")

#define four(p) (*(__local const float4*)(p))
#define products(a, b) ((a).x * (b).x + (a).y * (b).y + (a).z * (b).z + (a).w * (b).w)

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void delta_terms(__global const float* qkv, __global const float* gates, __global const int* state, __global float* w,
                 __global float* u, __global float* b, __global float* factors) {
    __local float queries[CHUNK * SLICE_PITCH] __attribute__((aligned(16))), keys[CHUNK * SLICE_PITCH] __attribute__((aligned(16)));
    __local float of_keys[CHUNK * PITCH] __attribute__((aligned(16)));  // A[s + 1 + i][s] in row s
    __local float of_queries[CHUNK * PITCH];                            // b[t][s]
    __local float decays[CHUNK], rates[CHUNK], grown[CHUNK];
    const int lid = get_local_id(0), v = get_group_id(1);
    const int end = (get_group_id(0) + 1) * CHUNK - (CHUNK - state[STATE_SNAPSHOT + 1] % CHUNK) % CHUNK;
    const int first = max(0, end - CHUNK), n = min(end, state[STATE_N_TOKENS]) - first;
    if (n <= 0) return;  // the same for the whole group
    const int key_head = HEADS_IN_TURN ? v % N_K : v / (N_V / N_K);
    qkv += (size_t)first * CHANNELS;
    const size_t row = (size_t)first * N_V + v;  // token t's row: row + t N_V

    if (lid < CHUNK) {
        decays[lid] = lid < n ? gates[(row + lid * N_V) * 2] : 1.0f;
        rates[lid] = lid < n ? gates[(row + lid * N_V) * 2 + 1] : 0.0f;
    }
    const int t0 = lid / KEYS * 4, s0 = lid % KEYS;
    float kk[8], qk[8];
    for (int i = 0; i < 8; ++i) kk[i] = qk[i] = 0.0f;
    for (int column = 0; column < D_K; column += SLICE) {
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int i = lid; i < CHUNK * SLICE; i += LOCAL_SIZE) {
            const int t = i / SLICE, c = i % SLICE;
            __global const float* row_of_token = qkv + (size_t)t * CHANNELS + key_head * D_K + column + c;
            queries[t * SLICE_PITCH + c] = t < n ? row_of_token[FIRST_Q] : 0.0f;
            keys[t * SLICE_PITCH + c] = t < n ? row_of_token[FIRST_K] : 0.0f;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        UNROLL
        for (int c = 0; c < SLICE; c += 4) {
            const float4 a0 = four(keys + s0 * SLICE_PITCH + c), a1 = four(keys + (s0 + KEYS) * SLICE_PITCH + c);
            UNROLL
            for (int i = 0; i < 4; ++i) {
                const float4 q = four(queries + (t0 + i) * SLICE_PITCH + c);
#if CORRECTS
                const float4 k = four(keys + (t0 + i) * SLICE_PITCH + c);
                kk[2 * i] += products(k, a0);
                kk[2 * i + 1] += products(k, a1);
#endif
                qk[2 * i] += products(q, a0);
                qk[2 * i + 1] += products(q, a1);
            }
        }
    }
    UNROLL
    for (int i = 0; i < 8; ++i) {
        const int t = t0 + i / 2, s = s0 + i % 2 * KEYS;
        if (t > s) of_keys[s * PITCH + t - s - 1] = kk[i];
        of_queries[t * PITCH + s] = qk[i];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lid < CHUNK) {
        float r = 1.0f;
        __local float* of_key = of_keys + lid * PITCH;
        for (int t = lid + 1; t < CHUNK; ++t) {
            r *= decays[t];
            of_key[t - lid - 1] *= r * rates[t];
        }
        for (int i = CHUNK - 1 - lid; i < CHUNK; ++i) of_key[i] = 0.0f;
        if (lid < n) factors[(row + lid * N_V) * 2 + 1] = r;
    } else if (lid < 2 * CHUNK) {
        const int s = lid - CHUNK;
        float r = 1.0f;
        for (int t = 0; t < CHUNK; ++t) {
            if (t > s) r *= decays[t];
            of_queries[t * PITCH + s] = t < s ? 0.0f : of_queries[t * PITCH + s] * r;
        }
    } else if (lid == 2 * CHUNK) {
        float g = 1.0f;
        for (int t = 0; t < CHUNK; ++t) {
            g *= decays[t];
            grown[t] = g;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lid < n) factors[(row + lid * N_V) * 2] = grown[lid];
    for (int i = lid; i < n * CHUNK; i += LOCAL_SIZE)
        b[(row + i / CHUNK * N_V) * CHUNK + i % CHUNK] = of_queries[i / CHUNK * PITCH + i % CHUNK];

#if !CORRECTS
    for (int i = lid; i < n * D_V; i += LOCAL_SIZE) {
        const int t = i / D_V, c = i % D_V;
        u[(row + t * N_V) * D_V + c] = qkv[(size_t)t * CHANNELS + FIRST_V + v * D_V + c] * rates[t];
    }
#else
    for (int c = lid; c < max(D_K, D_V); c += LOCAL_SIZE) {
        __global const float* key = qkv + FIRST_K + key_head * D_K + c;
        __global const float* value = qkv + FIRST_V + v * D_V + c;
        float x[CHUNK + 1], y[CHUNK + 1];
        UNROLL
        for (int t = 0; t < CHUNK; ++t) {
            x[t] = t < n && c < D_K ? key[(size_t)t * CHANNELS] * rates[t] * grown[t] : 0.0f;
            y[t] = t < n && c < D_V ? value[(size_t)t * CHANNELS] * rates[t] : 0.0f;
        }
        x[CHUNK] = y[CHUNK] = 0.0f;
        for (int t = 0; t < n; ++t) {
            const float of_x = x[0], of_y = y[0];
            if (c < D_K) w[(row + t * N_V) * D_K + c] = of_x;
            if (c < D_V) u[(row + t * N_V) * D_V + c] = of_y;
            UNROLL
            for (int i = 0; i < CHUNK; i += 4) {
                const float4 a = four(of_keys + t * PITCH + i);
                x[i] = x[i + 1] - a.x * of_x;
                x[i + 1] = x[i + 2] - a.y * of_x;
                x[i + 2] = x[i + 3] - a.z * of_x;
                x[i + 3] = x[i + 4] - a.w * of_x;
                y[i] = y[i + 1] - a.x * of_y;
                y[i + 1] = y[i + 2] - a.y * of_y;
                y[i + 2] = y[i + 3] - a.z * of_y;
                y[i + 3] = y[i + 4] - a.w * of_y;
            }
        }
    }
#endif
}

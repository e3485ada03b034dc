// Computes the inputs of Mamba-2's scan for each token (Dao and Gu, "Transformers are SSMs", 2024): x, B and C after a causal convolution
// with SiLU, and each head's decay and time step.
//
//   y = silu(conv(row))      step = clamp(softplus(raw + bias), LEAST_STEP, MOST_STEP)      decay = exp(step A)
//
// rows     float [n][CHANNELS + N_V D_V + N_V]: x, B, C, gates (not read here), raw time steps
// weights  float [LENGTH (+ 1)][CHANNELS], oldest input first (causal_conv.cl); CHANNELS = N_V D_V + 2 N_K D_K
// scalars  float [3][N_V]: A, below 0, the bias of the time steps, D (not read here)
// state    int, see STATE_*     states  float [slots][LENGTH - 1][CHANNELS] (causal_conv.cl)
// xbc      float [n][CHANNELS]: x for N_V heads, B for N_K groups, C      gates  float [n][N_V][2]: decay, time step
// Index space: groups (ceil(CHANNELS / (WIDTH RUN)), n), local size LOCAL_SIZE; a group's work-items share RUN WIDTH-wide pieces. The
// first group of a row also has the heads.
// Build: N_K, N_V, D_K, D_V (multiples of 16), RUN (a multiple of LOCAL_SIZE), LOCAL_SIZE, LEAST_STEP, MOST_STEP, and LENGTH, WIDTH,
// EACH_ALONE, CONV_BIAS of causal_conv.cl.
#if !defined(N_K) || !defined(N_V) || !defined(D_K) || !defined(D_V) || !defined(RUN) || !defined(LOCAL_SIZE) || \
    !defined(LEAST_STEP) || !defined(MOST_STEP)
#error "mamba_inputs.cl needs N_K, N_V, D_K, D_V, RUN, LOCAL_SIZE, LEAST_STEP, MOST_STEP and the build constants of causal_conv.cl"
#endif
#define CHANNELS (N_V * D_V + 2 * N_K * D_K)
#define ROW (CHANNELS + N_V * D_V + N_V)
#define GATED 0
#include "common/causal_conv.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void mamba_inputs(__global const float* rows, __global const float* weights, __global const float* scalars,
                  __global const int* state, __global float* states, __global float* xbc, __global float* gates) {
    const int t = get_group_id(1);
    __global const int* of_row = sequence_state(state, t);
    for (int piece = get_local_id(0); piece < RUN; piece += LOCAL_SIZE) {
        const int channel = (get_group_id(0) * RUN + piece) * WIDTH;
        if (channel >= CHANNELS) continue;
        const lanes_t y = convolved(rows, weights, of_row, states, t, channel);
        store_lanes(y / (1.0f + lanes_exp(-y)), xbc + (size_t)t * CHANNELS + channel);
    }
    if (get_group_id(0) > 0) return;
    for (int head = get_local_id(0); head < N_V; head += LOCAL_SIZE) {
        const float x = rows[(size_t)t * ROW + CHANNELS + N_V * D_V + head] + scalars[N_V + head];
        const float soft_plus = x > 20.0f ? x : log1p(exp(x));
        const float step = min(max(soft_plus, LEAST_STEP), MOST_STEP);
        gates[((size_t)t * N_V + head) * 2] = exp(scalars[head] * step);
        gates[((size_t)t * N_V + head) * 2 + 1] = step;
    }
}

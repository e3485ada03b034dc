// Computes the delta rule's inputs for each token (Yang et al., "Gated Delta Networks", 2024): queries, keys and values after a causal
// convolution with SiLU, with normalised queries and keys; the state's decay and learning rate.
//
//   y = silu(conv(row))      q = y_q / |y_q| / sqrt(D_K)      k = y_k / |y_k|      v = y_v      with |y|^2 = sum(y^2) + 1e-6
//   decay = exp(A softplus(a + bias))      rate = sigmoid(b)
//
// rows     float [n][2 N_K D_K + 2 N_V D_V + 2 N_V]: q, k, v, gates (not read here), b, a
// weights  float [LENGTH][CHANNELS], oldest input first; CHANNELS = 2 N_K D_K + N_V D_V
// scalars  float [2][N_V]: A, below 0, and the bias added to a
// state    int, see STATE_*     states  float [slots][LENGTH - 1][CHANNELS] (causal_conv.cl)
// qkv      float [n][CHANNELS]: q for N_K heads, k, v for N_V heads      gates  float [n][N_V][2]: decay, rate
// Index space: groups (ceil((2 N_K + N_V) / HEADS_PER_GROUP), n), local size LOCAL_SIZE; a group's work-items share its heads' columns.
// Build: N_K, N_V, D_K, D_V (multiples of 16), HEADS_PER_GROUP, LOCAL_SIZE (a power of two), and LENGTH, WIDTH, EACH_ALONE of
// causal_conv.cl. Local memory: 4 LOCAL_SIZE bytes.
#if !defined(N_K) || !defined(N_V) || !defined(D_K) || !defined(D_V) || !defined(HEADS_PER_GROUP) || !defined(LOCAL_SIZE)
#error "delta_inputs.cl needs N_K, N_V, D_K, D_V, HEADS_PER_GROUP, LOCAL_SIZE and the build constants of causal_conv.cl"
#endif
#define CHANNELS (2 * N_K * D_K + N_V * D_V)
#define ROW (CHANNELS + N_V * D_V + 2 * N_V)
#define GATED 0
#include "common/causal_conv.cl"
#include "common/reduce.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void delta_inputs(__global const float* rows, __global const float* weights, __global const float* scalars,
                  __global const int* state, __global float* states, __global float* qkv, __global float* gates) {
    LOCAL_SCRATCH(float, scratch);
    const int lid = get_local_id(0), t = get_group_id(1);
    __global const int* of_row = sequence_state(state, t);
    __global float* out = qkv + (size_t)t * CHANNELS;
    for (int j = 0; j < HEADS_PER_GROUP; ++j) {
        const int head = get_group_id(0) * HEADS_PER_GROUP + j;
        if (head >= 2 * N_K + N_V) break;
        const bool is_value = head >= 2 * N_K;
        const int first = is_value ? 2 * N_K * D_K + (head - 2 * N_K) * D_V : head * D_K;
        const int columns = is_value ? D_V : D_K;
        lanes_t squares = 0;
        for (int i = lid * WIDTH; i < columns; i += LOCAL_SIZE * WIDTH) {
            lanes_t y = convolved(rows, weights, of_row, states, t, first + i);
            y = y / (1.0f + lanes_exp(-y));
            squares += y * y;
            store_lanes(y, out + first + i);
        }
        if (!is_value) {
            const float sum = reduce_sum(lanes_sum(squares), scratch, lid);
            const float scale = 1.0f / sqrt((NO_OVERFLOW(sum) + 1e-6f) * (head < N_K ? (float)D_K : 1.0f));
            for (int i = lid * WIDTH; i < columns; i += LOCAL_SIZE * WIDTH)
                store_lanes(load_lanes(out + first + i) * scale, out + first + i);
        } else if (lid == 0) {
            const int v = head - 2 * N_K;
            __global const float* ba = rows + (size_t)t * ROW + CHANNELS + N_V * D_V;
            const float x = ba[N_V + v] + scalars[N_V + v];
            const float soft_plus = x > 20.0f ? x : log1p(exp(x));
            gates[((size_t)t * N_V + v) * 2] = exp(scalars[v] * soft_plus);
            gates[((size_t)t * N_V + v) * 2 + 1] = 1.0f / (1.0f + exp(-ba[v]));
        }
    }
}

// Runs a gated delta net, between its projections, for one token per sequence: fuses delta_inputs.cl, delta_rule.cl and gated_norm.cl
// into one launch.
//
//   q, k, v, decay, rate  from the row, see delta_inputs.cl;  S = decay S,  S += k (rate (v - S^T k))^T;  out = norm(S^T q) silu(z)
//
// rows     float [n][2 N_K D_K + 2 N_V D_V + 2 N_V]: q, k, v, z, b, a     weights  float [LENGTH][CHANNELS], oldest input first
// scalars  float [2][N_V]: A, below 0, and the bias added to a            norm     float [D_V]
// state    int, see STATE_*; at position 0 the slot counts as 0
// inputs   float [slots][LENGTH - 1][CHANNELS] (causal_conv.cl)           states   float [slots][N_V][D_K][D_V]
// out      float [n][N_V][D_V]
//
// Index space: groups (N_K, n), local size LOCAL_SIZE: a key head with its value heads, which share no channels with other groups. A
// work-item has D_K / PARTS rows in a column of S at a time, in registers; COLUMNS covers all its value heads, side by side.
// Build: N_K, N_V, D_K, D_V (multiples of 16), LENGTH, PARTS (divides D_K), LOCAL_SIZE (a divisor of COLUMNS times PARTS), EPS,
// HEADS_IN_TURN (see delta_rule.cl), step state constants. Local memory: 4 (2 D_K + 2 COLUMNS + 3 LOCAL_SIZE + 2 N_V / N_K) bytes.
#if !defined(N_K) || !defined(N_V) || !defined(D_K) || !defined(D_V) || !defined(PARTS) || !defined(LOCAL_SIZE) || !defined(EPS) || \
    !defined(HEADS_IN_TURN)
#error "delta_token.cl needs N_K, N_V, D_K, D_V, PARTS, LOCAL_SIZE, EPS, HEADS_IN_TURN and the build constants of causal_conv.cl"
#endif
#define CHANNELS (2 * N_K * D_K + N_V * D_V)
#define ROW (CHANNELS + N_V * D_V + 2 * N_V)
#define GATED 0
#define WIDTH 1
#define EACH_ALONE 1
#include "common/causal_conv.cl"

#define OF_KEY (N_V / N_K)
#define COLUMNS (OF_KEY * D_V)
#define COLUMNS_AT_ONCE (LOCAL_SIZE / PARTS)
#define ROWS (D_K / PARTS)
#define UNROLL _Pragma("unroll")
#define COLUMN_OF_S(column) (value_head(key_head, (column) / D_V) * (D_K * D_V) + (column) % D_V)

inline int value_head(const int key_head, const int number) {
    return HEADS_IN_TURN ? key_head + number * N_K : key_head * OF_KEY + number;
}

// n: a multiple of 4. Four partial sums, to shorten the chain of dependent additions.
inline float sum_of_squares(__local const float* x, const int n) {
    float4 sum = 0.0f;
    for (int i = 0; i < n / 4; ++i) {
        const float4 of_x = ((__local const float4*)x)[i];
        sum += of_x * of_x;
    }
    return (sum.x + sum.y) + (sum.z + sum.w);
}

// Loads the work-item's part of S, from row `part` ROWS on.
#define LOAD_S(from) \
    UNROLL for (int i = 0; i < ROWS; ++i) s[i] = has_past ? (from)[i * D_V] : 0.0f;

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void delta_token(__global const float* rows, __global const float* weights, __global const float* scalars, __global const float* norm,
                 __global const int* state, __global float* inputs, __global float* states, __global float* out) {
    __local float heads[2 * D_K + COLUMNS] __attribute__((aligned(16)));  // q, k, v for each value head
    __local float outputs[COLUMNS] __attribute__((aligned(16)));          // S^T q
    __local float gates[2 * OF_KEY];                                      // decay and rate for each value head
    __local float met_p[LOCAL_SIZE], met_r[LOCAL_SIZE], met_kq[LOCAL_SIZE];
    __local const float *q = heads, *k = heads + D_K, *v = heads + 2 * D_K;
    const int lid = get_local_id(0), part = lid / COLUMNS_AT_ONCE, key_head = get_group_id(0), t = get_group_id(1);
    __global const int* of_row = sequence_state(state, t);
    __global const float* row = rows + (size_t)t * ROW;
    const bool has_past = of_row[STATE_POSITION] > 0;
    __global float* own = states + ((size_t)of_row[STATE_RECURRENT] * N_V * D_K + part * ROWS) * D_V;
    float s[ROWS];  // in flight while the heads are computed
    LOAD_S(own + COLUMN_OF_S(lid % COLUMNS_AT_ONCE))

    for (int i = lid; i < 2 * D_K + COLUMNS; i += LOCAL_SIZE) {
        const int column = i - 2 * D_K, head = i / D_K;  // value column; head 0: queries, 1: keys
        const int channel = column < 0 ? (head * N_K + key_head) * D_K + i % D_K
                                       : 2 * N_K * D_K + value_head(key_head, column / D_V) * D_V + column % D_V;
        const float y = convolved(rows, weights, of_row, inputs, t, channel);
        heads[i] = y / (1.0f + exp(-y));
    }
    if (lid < OF_KEY) {
        const int head = value_head(key_head, lid);
        __global const float* ba = row + CHANNELS + N_V * D_V;
        const float x = ba[N_V + head] + scalars[N_V + head];
        gates[2 * lid] = exp(scalars[head] * (x > 20.0f ? x : log1p(exp(x))));
        gates[2 * lid + 1] = 1.0f / (1.0f + exp(-ba[head]));
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const float of_q = 1.0f / sqrt((NO_OVERFLOW(sum_of_squares(q, D_K)) + 1e-6f) * D_K);
    const float of_k = 1.0f / sqrt(NO_OVERFLOW(sum_of_squares(k, D_K)) + 1e-6f);

    for (int first = 0; first < COLUMNS; first += COLUMNS_AT_ONCE) {
        const int column = first + lid % COLUMNS_AT_ONCE, number = column / D_V;
        __global float* slot = own + COLUMN_OF_S(column);
        float p = 0.0f, r = 0.0f, kq = 0.0f;
        UNROLL
        for (int i = 0; i < ROWS; ++i) {
            const float key = k[part * ROWS + i] * of_k, query = q[part * ROWS + i] * of_q;
            p += s[i] * key;
            r += s[i] * query;
            kq += key * query;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        met_p[lid] = p;
        met_r[lid] = r;
        met_kq[lid] = kq;
        barrier(CLK_LOCAL_MEM_FENCE);
        p = r = kq = 0.0f;
        for (int i = lid % COLUMNS_AT_ONCE; i < LOCAL_SIZE; i += COLUMNS_AT_ONCE) {
            p += met_p[i];
            r += met_r[i];
            kq += met_kq[i];
        }
        const float decay = gates[2 * number], d = (v[column] - p * decay) * gates[2 * number + 1];
        UNROLL
        for (int i = 0; i < ROWS; ++i) slot[i * D_V] = s[i] * decay + d * (k[part * ROWS + i] * of_k);
        if (part == 0) outputs[column] = r * decay + d * kq;
        if (first + COLUMNS_AT_ONCE < COLUMNS) {
            LOAD_S(own + COLUMN_OF_S(column + COLUMNS_AT_ONCE))
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int column = lid; column < COLUMNS; column += LOCAL_SIZE) {
        const int number = column / D_V, at = value_head(key_head, number) * D_V + column % D_V;
        const float sum = sum_of_squares(outputs + number * D_V, D_V), z = row[CHANNELS + at];
        const float y = outputs[column] / sqrt(NO_OVERFLOW(sum) / D_V + EPS) * norm[column % D_V];
        out[(size_t)t * N_V * D_V + at] = y * z / (1.0f + exp(-z));
    }
}

// The replacement for attention in a recurrent layer of nvidia/persistent_layers.cl: the work between two products for one token,
// by the formulas in portable/short_conv.cl, or in portable/delta_inputs.cl, delta_rule.cl and gated_norm.cl. Input rows carry
// flags, and so does the result.
//
// SHORT_CONV: a work-group takes CONV_RUN channels, a work-item one.
//
// DELTA_NET: a work-group takes a value head and its key head. A work-item loads HEAD_ROWS rows in a column of the head's state S
// before the inputs arrive, and mixes a channel of q, k or v:
//
//     S of a head   columns: lid % D_V            channels: lid     [ q: D_K | k: D_K | v: D_V ]
//                   +----------------+
//     part 0        | rows 0 ..      |   p = S^T k, r = S^T q are added over the parts in local memory; then each work-item updates
//     part 1        |                |   its rows
//                   +----------------+
//
// Groups with the same key head read the same convolution inputs from earlier tokens. The group with the first of these heads
// stores the new inputs in a later phase, when all groups have read the old inputs (`keep_inputs`).
//
// Build: for SHORT_CONV CHANNELS, LENGTH; for DELTA_NET N_K, N_V, D_K, D_V (multiples of 32), LENGTH, HEADS_IN_TURN; LOCAL_SIZE, a
// multiple of D_V and at least 2 D_K + D_V; NORM_EPS. Local memory: mixer_memory, and 3 LOCAL_SIZE floats.
#include "common/common.cl"
#include "nvidia/ptx.cl"
#include "nvidia/flag_in_data.cl"

// Waits for a value and returns it. Called by all lanes in a warp.
inline float receive1(__global const float* from, const uint flag) {
    uint word = flag ^ 1;
    bool missing = true;
    do {
        poll1(&word, from, missing);
        missing = (word ^ flag) & 1;
    } while (warp_any(missing));
    return value_of(word);
}

#ifdef SHORT_CONV
typedef struct {
    int slot;  // slot of the sequence's state; negative at the beginning of a text: then -1 - slot
} mixer_memory;
#define CONV_RUN ((CHANNELS + 32 * N_GROUPS - 1) / (32 * N_GROUPS) * 32)
#if CONV_RUN > LOCAL_SIZE
#error "nvidia/recurrent_mixers.cl: a work-group has as many work-items as channels"
#endif

// The work of work-group `group`. rows: b, c and x. inputs: the states in all slots.
inline void mix_short_conv(const int group, __global const float* rows, const uint rows_flag, __global const float* weights,
                           __global float* inputs, const int slot_word, __global float* mixed, const uint flag) {
    const int lid = this_item(), channel = group * CONV_RUN + lid;
    if (lid / WARP * WARP >= CONV_RUN || channel / WARP * WARP >= CHANNELS) return;
    const bool here = channel < CHANNELS, has_past = slot_word >= 0;
    const int at = min(channel, CHANNELS - 1);
    __global float* past = inputs + (size_t)(has_past ? slot_word : -1 - slot_word) * (LENGTH - 1) * CHANNELS + at;
    float u[LENGTH], w[LENGTH];
#pragma unroll
    for (int i = 0; i < LENGTH - 1; ++i) u[i] = has_past ? past[i * CHANNELS] : 0.0f;
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) w[i] = weights[i * CHANNELS + at];
    const float2 bx = receive2(rows + at, rows + 2 * CHANNELS + at, rows_flag, true);
    const float c = receive1(rows + CHANNELS + at, rows_flag);
    u[LENGTH - 1] = bx.x * bx.y;
    float y = u[LENGTH - 1] * w[LENGTH - 1];
#pragma unroll
    for (int back = 1; back < LENGTH; ++back) y += u[LENGTH - 1 - back] * w[LENGTH - 1 - back];
    if (here) {
        send(mixed + at, c * y, flag);
#pragma unroll
        for (int i = 0; i < LENGTH - 1; ++i) past[i * CHANNELS] = u[i + 1];
    }
    warp_sync();  // no lane waits for values that its own warp has yet to send
}
#endif

#ifdef DELTA_NET
#define OF_HEAD (2 * D_K + D_V)  // channels per value head
#define CONV_CHANNELS (2 * N_K * D_K + N_V * D_V)
#define HEAD_PARTS (LOCAL_SIZE / D_V)
#define HEAD_ROWS (D_K / HEAD_PARTS)
#define KEY_HEAD(v) (HEADS_IN_TURN ? (v) % N_K : (v) / (N_V / N_K))
#define KEEPS_KEY_HEAD(v) (HEADS_IN_TURN ? (v) < N_K : (v) % (N_V / N_K) == 0)
#if LOCAL_SIZE % D_V || D_K % HEAD_PARTS || OF_HEAD > LOCAL_SIZE || D_K % 32 || D_V % 32
#error "nvidia/recurrent_mixers.cl: D_K and D_V are multiples of 32, and LOCAL_SIZE one of D_V and at least 2 D_K + D_V"
#endif

typedef struct {
    float heads[OF_HEAD] __attribute__((aligned(16)));  // q, k, v after the convolution
    float inputs[LENGTH - 1][OF_HEAD];                  // inputs for the next token
    float squares[2][LOCAL_SIZE / WARP];                // for a warp's channels; for its outputs
    float decay, rate;
    int slot;  // as above
} mixer_memory;

// The channel for value head v and index i in q, k and v.
inline int channel_of(const int v, const int i) {
    return i < 2 * D_K ? (i / D_K * N_K + KEY_HEAD(v)) * D_K + i % D_K : 2 * N_K * D_K + v * D_V + i - 2 * D_K;
}

inline __global float* state_of_head(__global float* states, const int v, const int slot_word) {
    return states + ((size_t)(slot_word >= 0 ? slot_word : -1 - slot_word) * N_V + v) * D_K * D_V;
}

// The work for value head v. rows: q, k, v, z, b, a. scratch: 3 LOCAL_SIZE floats, in use elsewhere until the first row has arrived.
inline void mix_delta_head(const int v, __global const float* rows, const uint rows_flag, __global const float* weights,
                           __global const float* scalars, __global const float* norm, __global const float* inputs,
                           __global float* states, __local mixer_memory* memory, __local float* scratch, __global float* mixed,
                           const uint flag) {
    const int lid = this_item(), lane = lid % WARP, warp = lid / WARP, column = lid % D_V, part = lid / D_V;
    const int slot_word = *(volatile __local const int*)&memory->slot;
    const bool has_past = slot_word >= 0;
    __global float* own = state_of_head(states, v, slot_word) + part * HEAD_ROWS * D_V + column;
    float s[HEAD_ROWS];
#pragma unroll
    for (int i = 0; i < HEAD_ROWS; ++i) s[i] = has_past ? own[i * D_V] : 0.0f;
    const float factor = norm[column];
    if (warp < OF_HEAD / WARP) {
        const int channel = channel_of(v, lid);
        __global const float* past = inputs + (size_t)(has_past ? slot_word : -1 - slot_word) * (LENGTH - 1) * CONV_CHANNELS + channel;
        float u[LENGTH], w[LENGTH];
#pragma unroll
        for (int i = 0; i < LENGTH - 1; ++i) u[i] = has_past ? past[i * CONV_CHANNELS] : 0.0f;
#pragma unroll
        for (int i = 0; i < LENGTH; ++i) w[i] = weights[i * CONV_CHANNELS + channel];
        u[LENGTH - 1] = receive1(rows + channel, rows_flag);
        float y = u[LENGTH - 1] * w[LENGTH - 1];
#pragma unroll
        for (int back = 1; back < LENGTH; ++back) y += u[LENGTH - 1 - back] * w[LENGTH - 1 - back];
        y = y / (1.0f + exp(-y));
        memory->heads[lid] = y;
#pragma unroll
        for (int i = 0; i < LENGTH - 1; ++i) memory->inputs[i][lid] = u[i + 1];
        const float square = warp_sum(y * y);
        if (lane == 0) memory->squares[0][warp] = square;
    }
    __global const float* gates = rows + CONV_CHANNELS;
    if (warp == LOCAL_SIZE / WARP - 1) {
        const float2 ba = receive2(gates + N_V * D_V + v, gates + N_V * D_V + N_V + v, rows_flag, true);
        const float x = ba.y + scalars[N_V + v], decay = exp(scalars[v] * (x > 20.0f ? x : log1p(exp(x))));
        if (lane == 0) {
            memory->decay = decay;
            memory->rate = 1.0f / (1.0f + exp(-ba.x));
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    float of_q = 0.0f, of_k = 0.0f;
#pragma unroll
    for (int i = 0; i < D_K / WARP; ++i) {
        of_q += memory->squares[0][i];
        of_k += memory->squares[0][D_K / WARP + i];
    }
    of_q = 1.0f / sqrt((NO_OVERFLOW(of_q) + 1e-6f) * D_K);
    of_k = 1.0f / sqrt(NO_OVERFLOW(of_k) + 1e-6f);
    __local const float *q = memory->heads + part * HEAD_ROWS, *k = q + D_K;
    float p = 0.0f, r = 0.0f, kq = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_ROWS; ++i) {
        p += s[i] * k[i];
        r += s[i] * q[i];
        kq += k[i] * q[i];
    }
    scratch[lid] = p;
    scratch[LOCAL_SIZE + lid] = r;
    scratch[2 * LOCAL_SIZE + lid] = kq;
    barrier(CLK_LOCAL_MEM_FENCE);
    p = r = kq = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_PARTS; ++i) {
        p += scratch[i * D_V + column];
        r += scratch[LOCAL_SIZE + i * D_V + column];
        kq += scratch[2 * LOCAL_SIZE + i * D_V + column];
    }
    const float decay = memory->decay;
    const float d = (memory->heads[2 * D_K + column] - p * of_k * decay) * memory->rate;
    const float y = r * of_q * decay + d * (kq * of_q * of_k);
    const float square = warp_sum(y * y);
    if (lane == 0) memory->squares[1][warp] = square;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (part == 0) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < D_V / WARP; ++i) sum += memory->squares[1][i];
        const float z = receive1(gates + v * D_V + column, rows_flag);
        send(mixed + v * D_V + column, y / sqrt(NO_OVERFLOW(sum) / D_V + NORM_EPS) * factor * z / (1.0f + exp(-z)), flag);
        warp_sync();  // no lane waits for values that its own warp has yet to send
    }
#pragma unroll
    for (int i = 0; i < HEAD_ROWS; ++i) own[i * D_V] = s[i] * decay + d * of_k * k[i];
}

// Stores the convolution inputs for the next token, once all groups have read the old inputs.
inline void keep_inputs(const int v, __global float* inputs, __local const mixer_memory* memory) {
    const int lid = this_item(), slot_word = *(volatile __local const int*)&memory->slot;
    if (lid >= OF_HEAD || (lid < 2 * D_K && !KEEPS_KEY_HEAD(v))) return;
    __global float* to = inputs + (size_t)(slot_word >= 0 ? slot_word : -1 - slot_word) * (LENGTH - 1) * CONV_CHANNELS + channel_of(v, lid);
#pragma unroll
    for (int i = 0; i < LENGTH - 1; ++i) to[i * CONV_CHANNELS] = memory->inputs[i][lid];
}
#endif

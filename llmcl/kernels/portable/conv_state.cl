// Updates a sequence's convolution state after a step of consecutive tokens: the last LENGTH - 1 inputs (causal_conv.cl).
//
//   states[slot][i] = u[n - LENGTH + 1 + i],   with u from the slot for tokens before the step
//
// With a snapshot, also stores the state after the step's first `cut` tokens in the snapshot's slot.
//
// rows   float [n][ROW]      state  int, see STATE_*, which has n      states  float [slots][LENGTH - 1][CHANNELS]
// Index space: groups (ceil(CHANNELS / (WIDTH RUN))), local size LOCAL_SIZE; a group's work-items share RUN WIDTH-wide pieces.
// Build: RUN (a multiple of LOCAL_SIZE), LOCAL_SIZE, and ROW, CHANNELS, LENGTH, WIDTH, GATED of causal_conv.cl.
#if !defined(RUN) || !defined(LOCAL_SIZE) || !defined(STATE_N_TOKENS) || !defined(STATE_SNAPSHOT)
#error "conv_state.cl needs the build constants RUN, LOCAL_SIZE and those of causal_conv.cl"
#endif
#define EACH_ALONE 0
#include "common/causal_conv.cl"

// Input i in the state after the step's first n tokens. past: the channel's old state.
inline lanes_t input_of_state(__global const float* rows, __global const int* state, __global const float* past, const int n,
                              const int i, const int channel) {
    const int from = n - (LENGTH - 1) + i;
    lanes_t u = 0;
    if (from >= 0) u = conv_input(rows + (size_t)from * ROW, channel);
    else if (state[STATE_POSITION] > 0) u = load_lanes(past + (n + i) * CHANNELS);
    return u;
}

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void conv_state(__global const float* rows, __global const int* state, __global float* states) {
    const int n = state[STATE_N_TOKENS], snapshot = state[STATE_SNAPSHOT], cut = state[STATE_SNAPSHOT + 1];
    for (int piece = get_local_id(0); piece < RUN; piece += LOCAL_SIZE) {
        const int channel = (get_group_id(0) * RUN + piece) * WIDTH;
        if (channel >= CHANNELS) continue;
        __global float* past = conv_past(states, state) + channel;
        __global float* kept = states + (size_t)snapshot * (LENGTH - 1) * CHANNELS + channel;
        for (int i = 0; i < LENGTH - 1 && cut > 0; ++i)
            store_lanes(input_of_state(rows, state, past, cut, i, channel), kept + i * CHANNELS);
        for (int i = 0; i < LENGTH - 1; ++i)  // ascending order: reads stay ahead of writes
            store_lanes(input_of_state(rows, state, past, n, i, channel), past + i * CHANNELS);
    }
}

// A causal convolution per channel, over the last LENGTH inputs of a sequence.
//
//   y[t][c] = sum over j of weights[j][c] u[t - LENGTH + 1 + j][c],   u before the first token: 0
//
// With CONV_BIAS, weights[LENGTH][c] is added.
//
// Inputs from earlier steps are the sequence's state: states float [slots][LENGTH - 1][CHANNELS], the last inputs, oldest first. A
// sequence's slot is in its record of the step state. At position 0 the slot's content counts as 0.
//
// A step's rows are consecutive tokens of a single sequence, or (EACH_ALONE) each row is the only token of a different
// sequence. With EACH_ALONE, the work-item that computes a channel also updates the state; otherwise conv_state.cl does, after
// all reads.
//
// u for a row: the first CHANNELS values, or (GATED) the first CHANNELS values times the CHANNELS values from 2 CHANNELS on.
// Build: ROW (values per row), CHANNELS (a multiple of WIDTH), LENGTH (2 or more), WIDTH (lanes.cl), EACH_ALONE, GATED, CONV_BIAS (left
// out: 0), STATE_RECURRENT and the constants of the step state.
#if !defined(ROW) || !defined(CHANNELS) || !defined(LENGTH) || !defined(WIDTH) || !defined(EACH_ALONE) || !defined(GATED) || \
    !defined(STATE_RECURRENT) || !defined(STATE_POSITION)
#error "causal_conv.cl needs ROW, CHANNELS, LENGTH, WIDTH, EACH_ALONE, GATED and the constants of the step state"
#endif
#include "common/common.cl"
#include "common/lanes.cl"
#include "common/step_rows.cl"

inline lanes_t conv_input(__global const float* row, const int channel) {
#if GATED
    return load_lanes(row + channel) * load_lanes(row + 2 * CHANNELS + channel);
#else
    return load_lanes(row + channel);
#endif
}

inline __global float* conv_past(__global float* states, __global const int* state) {
    return states + (size_t)state[STATE_RECURRENT] * (LENGTH - 1) * CHANNELS;
}

// Returns y for row t; `state` is the record of the row's sequence.
inline lanes_t convolved(__global const float* rows, __global const float* weights, __global const int* state,
                         __global float* states, const int t, const int channel) {
    __global float* past = conv_past(states, state) + channel;
    const int before = EACH_ALONE ? 0 : t;  // earlier rows with the same sequence
    const bool has_past = state[STATE_POSITION] > 0;
    const lanes_t own = conv_input(rows + (size_t)t * ROW, channel);
    lanes_t y = own * load_lanes(weights + (LENGTH - 1) * CHANNELS + channel);
#if CONV_BIAS
    y += load_lanes(weights + LENGTH * CHANNELS + channel);
#endif
    for (int back = 1; back < LENGTH; ++back) {
        lanes_t u = 0;
        if (back <= before) u = conv_input(rows + (size_t)(t - back) * ROW, channel);
        else if (has_past) u = load_lanes(past + (LENGTH - 1 + before - back) * CHANNELS);
        y += u * load_lanes(weights + (LENGTH - 1 - back) * CHANNELS + channel);
    }
#if EACH_ALONE
    for (int i = 0; i < LENGTH - 2; ++i) {
        lanes_t next = 0;
        if (has_past) next = load_lanes(past + (i + 1) * CHANNELS);
        store_lanes(next, past + i * CHANNELS);
    }
    store_lanes(own, past + (LENGTH - 2) * CHANNELS);
#endif
    return y;
}

// LFM2's short convolution (Liquid AI, "LFM2 Technical Report", 2025) between its two projections:
//
//   b, c, x = row;   out[t] = c conv(b x)[t]
//
// rows     float [n][3 CHANNELS]: b, c, x     weights  float [LENGTH (+ 1)][CHANNELS], oldest input first (causal_conv.cl)
// state    int, see STATE_*                   states   float [slots][LENGTH - 1][CHANNELS] (causal_conv.cl)
// out      float [n][CHANNELS]
// Index space: groups (ceil(CHANNELS / (WIDTH RUN)), n), local size LOCAL_SIZE; a group's work-items share RUN WIDTH-wide pieces.
// Build: CHANNELS (a multiple of 16), RUN (a multiple of LOCAL_SIZE), LOCAL_SIZE, and LENGTH, WIDTH, EACH_ALONE, CONV_BIAS
// of causal_conv.cl.
#if !defined(CHANNELS) || !defined(RUN) || !defined(LOCAL_SIZE)
#error "short_conv.cl needs the build constants CHANNELS, RUN, LOCAL_SIZE and those of causal_conv.cl"
#endif
#define ROW (3 * CHANNELS)
#define GATED 1
#include "common/causal_conv.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void short_conv(__global const float* rows, __global const float* weights, __global const int* state, __global float* states,
                __global float* out) {
    const int t = get_group_id(1);
    __global const int* of_row = sequence_state(state, t);
    for (int piece = get_local_id(0); piece < RUN; piece += LOCAL_SIZE) {
        const int channel = (get_group_id(0) * RUN + piece) * WIDTH;
        if (channel >= CHANNELS) continue;
        const lanes_t y = convolved(rows, weights, of_row, states, t, channel);
        const lanes_t c = load_lanes(rows + (size_t)t * ROW + CHANNELS + channel);
        store_lanes(c * y, out + (size_t)t * CHANNELS + channel);
    }
}

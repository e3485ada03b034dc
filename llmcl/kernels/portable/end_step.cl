// The end of a row's sampling. Buffers: see sample.cl. After common/step_rows.cl. Build: VOCAB, N_SEQUENCES.

// Whether the row has a presence or a frequency penalty.
inline bool counts_tokens(__global const int* sampling) {
    return (sampling[SAMPLING_PRESENCE_PENALTY] | sampling[SAMPLING_FREQUENCY_PENALTY]) != 0;
}

// Ends the step: hands a row's token to the host and to the next step, and advances the position. Run by one work-item.
// If no logit is a number, or the best score is infinite, the token is VOCAB and the host reports an error.
inline void end_step(const float2 best, const int row, __global const int* sampling, __global int* state, __global int* tokens,
                     __global int* sampled, __global int* counts) {
    const int token = isinf(best.x) ? VOCAB : as_int(best.y);
    if (counts_tokens(sampling) && token < VOCAB) counts[(size_t)sequence_of(state, row) * VOCAB + token] += 1;
    sampled[state[STATE_STEP] % STATE_RING * N_SEQUENCES + row] = token;
    tokens[sequence_of(state, row)] = min(token, VOCAB - 1);
    state = sequence_state(state, row);
    state[STATE_POSITION] += state[STATE_N_TOKENS];
    state[STATE_N_TOKENS] = 1;
    state[STATE_STEP] += 1;
}

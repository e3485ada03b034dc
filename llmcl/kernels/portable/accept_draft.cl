// Accepts drafted tokens as long as they are what the row before sampled, and leaves the text after them: the end of a step that
// verifies a draft. Then the text is as if each token had been sampled by a step of its own.
//
//   a = the largest number with tokens[i + 1] = sampled[i] for all i < a;   a + 1 tokens were sampled: sampled[0] to sampled[a]
//   accepted = a + 1, sampled[0], ..., sampled[a];   tokens[0] = sampled[a];   position += a + 1, step += a + 1, n_tokens = 1
//
// row_sampled  int [n]: what each row sampled; VOCAB where it could choose none
// state        int, see STATE_*, of the text, with n tokens in this step     tokens  int [n]: the rows
// ring         int [STATE_RING]: the text's sampled tokens by step
// last_seen    int [VOCAB]: the latest position of each token, of which those of the rows 0 to a are new
// counts       int [VOCAB]: how often the answer has each token, of which sampled[0] to sampled[a] are new
// accepted     int [n + 1]
//
// Index space: one work-item. Build: VOCAB, those of the step state.
#if !defined(VOCAB) || !defined(STATE_STEP) || !defined(STATE_RING)
#error "accept_draft.cl needs the build constants VOCAB and those of the step state"
#endif

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void accept_draft(__global const int* row_sampled, __global int* state, __global int* tokens, __global int* ring,
                  __global int* last_seen, __global int* counts, __global int* accepted) {
    const int n = state[STATE_N_TOKENS], position = state[STATE_POSITION], step = state[STATE_STEP];
    int taken = 1;
    while (taken < n && tokens[taken] == row_sampled[taken - 1]) ++taken;
    accepted[0] = taken;
    for (int i = 0; i < taken; ++i) {
        accepted[1 + i] = ring[(step + i) % STATE_RING] = row_sampled[i];
        last_seen[tokens[i]] = position + i;
        if (row_sampled[i] < VOCAB) atomic_inc(counts + row_sampled[i]);  // nobody waits for an atomic's result
    }
    tokens[0] = min(row_sampled[taken - 1], VOCAB - 1);
    state[STATE_POSITION] = position + taken;
    state[STATE_N_TOKENS] = 1;
    state[STATE_STEP] = step + taken;
}

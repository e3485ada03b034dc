// The step that verifies a draft: the token sampled last, and after it the drafted ones, become the rows of a step. What is
// sampled of row r is token number step + r of the generation, at position + r, as if the rows before had been sampled one by one.
//
//   tokens[1 + i] = draft[1 + i];   n_tokens = 1 + draft[0];   of row r: position + r, one token, step + r
//
// draft   int [MAX_ROWS]: the number of drafted tokens, 0 to MAX_ROWS - 1, and these
// state   int, see STATE_*, of the text     tokens  int [.]: tokens[0] is the token sampled last
// rows    int: a step state of several sequences (step_rows.cl), of which each stands for a row
//
// Index space: one work-item. Build: MAX_ROWS, STATE_SEQUENCES and SEQUENCE_SLOTS of `rows`, those of the step state.
// The host must have checked the ids, and that the step state has room for the rows.
#if !defined(MAX_ROWS) || !defined(STATE_SEQUENCES) || !defined(SEQUENCE_SLOTS) || !defined(STATE_STEP)
#error "draft_rows.cl needs the build constants MAX_ROWS, STATE_SEQUENCES, SEQUENCE_SLOTS and those of the step state"
#endif

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void draft_rows(__global const int* draft, __global int* state, __global int* tokens, __global int* rows) {
    const int n = min(1 + draft[0], MAX_ROWS);
    for (int i = 1; i < n; ++i) tokens[i] = draft[i];
    state[STATE_N_TOKENS] = n;
    for (int r = 0; r < n; ++r) {
        __global int* row = rows + STATE_SEQUENCES + r * SEQUENCE_SLOTS;
        row[STATE_POSITION] = state[STATE_POSITION] + r;
        row[STATE_N_TOKENS] = 1;
        row[STATE_STEP] = state[STATE_STEP] + r;
    }
}

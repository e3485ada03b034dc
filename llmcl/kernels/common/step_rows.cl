// Maps a work-group to a row of the step. With a single sequence, row t is the token at position + t. With RECORDS, there are
// several sequences with a row each.
//
//   state   [ the step ][ rows: sequence of each row ][ sequence 0: position, ..., page table ][ sequence 1 ] ...
//           0           STATE_ROWS                    state[RECORDS], state[RECORD_SLOTS] each
//
// With ROW_SLOTS a sequence may have any number of rows (ragged_step.py): each row holds its sequence, its position, and its token,
// or -1 for the token sampled last. Chunk rows are divided into pieces: rows of a single sequence that a work-group takes together.
// STATE_PIECES is an expression in `state` for the table of pieces:
//
//   state + STATE_PIECES = int4 { sequence, first row, rows, position of the first row } [N_PIECES]
//
// step_row is the row of a work-group; with several sequences, a single-token kernel has an extra dimension for rows.
// `sequence_state` holds for a row of several sequences what `state` holds for a single sequence. Per-sequence buffers (tokens,
// latest positions, sampling parameters) are stored in sequence order.
#ifdef RECORDS
#if !defined(RECORD_SLOTS) || !defined(STATE_ROWS)
#error "step_rows.cl needs the build constants RECORD_SLOTS and STATE_ROWS with RECORDS"
#endif
#ifdef ROW_SLOTS
#define sequence_of(state, row) ((state)[STATE_ROWS + ROW_SLOTS * (row)])
#define row_position(state, row) ((state)[STATE_ROWS + ROW_SLOTS * (row) + 1])
inline int row_token(__global const int* tokens, __global const int* state, const int row) {
    const int given = state[STATE_ROWS + ROW_SLOTS * row + 2];
    return given < 0 ? tokens[sequence_of(state, row)] : given;
}
#else
#define sequence_of(state, row) ((state)[STATE_ROWS + (row)])
#define row_position(state, row) (sequence_state(state, row)[STATE_POSITION])
#define row_token(tokens, state, row) ((tokens)[sequence_of(state, row)])
#endif
#ifdef STATE_PIECES
inline int4 piece_at(__global const int* state, const int number) {
    return ((__global const int4*)(state + STATE_PIECES))[number];
}
#endif
#define sequence_at(state, number) ((state) + (state)[RECORDS] + (number) * (state)[RECORD_SLOTS])
#define sequence_state(state, row) sequence_at(state, sequence_of(state, row))
#define step_row(dimension) ((int)get_group_id(dimension))
#else
#define sequence_of(state, row) 0
#define sequence_state(state, row) (state)
#define row_position(state, row) ((state)[STATE_POSITION] + (row))
#define row_token(tokens, state, row) ((tokens)[row])
#define step_row(dimension) 0
#endif

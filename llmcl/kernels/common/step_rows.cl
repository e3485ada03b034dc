// Whose row of a step a work-group has: of the one sequence there is, row t being its token at position + t, or (built with
// STATE_SEQUENCES) of several sequences, which have a row each.
//
//   state   [ the step ][ sequence 0: position, ..., page table ][ sequence 1 ] ... [ rows: of which sequence each is ]
//           0           STATE_SEQUENCES, SEQUENCE_SLOTS each                        STATE_ROWS
//
// step_row is the row of a work-group, of which a kernel for one token has a dimension more where there are several.
// What a kernel finds in `state` for one sequence, it finds in `sequence_state` for a row of several. Buffers that a sequence has
// to itself (tokens, latest positions, sampling parameters) lie one after the other, in the order of the sequences.
#ifdef STATE_SEQUENCES
#if !defined(SEQUENCE_SLOTS) || !defined(STATE_ROWS)
#error "step_rows.cl needs the build constants SEQUENCE_SLOTS and STATE_ROWS with STATE_SEQUENCES"
#endif
#define sequence_of(state, row) ((state)[STATE_ROWS + (row)])
#define sequence_state(state, row) ((state) + STATE_SEQUENCES + sequence_of(state, row) * SEQUENCE_SLOTS)
#define row_position(state, row) (sequence_state(state, row)[STATE_POSITION])
#define row_token(state, row) sequence_of(state, row)
#define step_row(dimension) ((int)get_group_id(dimension))
#else
#define sequence_of(state, row) 0
#define sequence_state(state, row) (state)
#define row_position(state, row) ((state)[STATE_POSITION] + (row))
#define row_token(state, row) (row)
#define step_row(dimension) 0
#endif

// The step that verifies drafts: each text has the token that it sampled last as a row, and after it the drafted ones. What
// is sampled of a row is token number text.step + i of the text's answer, at position text.position + i, as if the rows before
// had been sampled one by one; i counts the rows of the text. So each row gets a record of its own, as a sequence of `rows`.
//
//   record r: position of the row, one token, step of the text + i;    row_sampling[r] = sampling of the text
//
// Of a step of one text the drafted tokens become its rows here: tokens[1 + i] = draft[1 + i], n_tokens = 1 + draft[0].
//
// draft         int [MAX_ROWS]: the number of drafted tokens, 0 to MAX_ROWS - 1, and these; not read of several texts
// state         int, of the step (step_rows.cl)     tokens  int [.]: of each text the token sampled last
// texts         int: the step state of the texts, of which a record has TEXT_SLOTS, the first at TEXTS
// sampling      int [texts][SAMPLING_SLOTS], row_sampling [rows][SAMPLING_SLOTS]
// rows          int: a step state of MAX_ROWS sequences, each of which stands for a row: ROW_RECORD_SLOTS, the first at ROW_RECORDS
//
// Index space: one group of MAX_ROWS. Build: MAX_ROWS, SAMPLING_SLOTS, TEXTS, TEXT_SLOTS, ROW_RECORDS, ROW_RECORD_SLOTS, those of
// the step state. The host must have checked the ids, and that the step state has room for the rows.
#if !defined(MAX_ROWS) || !defined(SAMPLING_SLOTS) || !defined(TEXTS) || !defined(TEXT_SLOTS) || !defined(ROW_RECORDS) || \
    !defined(ROW_RECORD_SLOTS) || !defined(STATE_STEP)
#error "draft_rows.cl needs the build constants named in its head"
#endif
#include "common/step_rows.cl"

__kernel __attribute__((reqd_work_group_size(MAX_ROWS, 1, 1)))
void draft_rows(__global const int* draft, __global int* state, __global int* tokens, __global const int* texts,
                __global const int* sampling, __global int* rows, __global int* row_sampling) {
    const int r = get_local_id(0);
#ifdef RECORDS
    const int n = state[STATE_N_TOKENS];
#else
    const int n = min(1 + draft[0], MAX_ROWS);
    if (0 < r && r < n) tokens[r] = draft[r];
    if (r == 0) state[STATE_N_TOKENS] = n;
#endif
    if (r >= n) return;
    const int place = sequence_of(state, r), position = row_position(state, r);
    __global const int* text = texts + TEXTS + place * TEXT_SLOTS;
    __global int* row = rows + ROW_RECORDS + r * ROW_RECORD_SLOTS;
    row[STATE_POSITION] = position;
    row[STATE_N_TOKENS] = 1;
    row[STATE_STEP] = text[STATE_STEP] + position - text[STATE_POSITION];
    for (int i = 0; i < SAMPLING_SLOTS; ++i) row_sampling[r * SAMPLING_SLOTS + i] = sampling[place * SAMPLING_SLOTS + i];
}

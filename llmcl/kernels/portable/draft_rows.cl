// Prepares a step that verifies drafts: each text's last sampled token becomes a row, followed by the drafted tokens. Row i of a text
// samples token number text.step + i in the text's answer at position text.position + i, as if the earlier rows had been sampled one by
// one. Each row therefore gets its own record, like a sequence in `rows`.
//
//   record r: row position, one token, text step + i;    row_sampling[r] = the text's sampling
//
// In a step with a single text the drafted tokens become rows here: tokens[1 + i] = draft[1 + i], n_tokens = 1 + draft[0].
//
// draft         int [MAX_ROWS]: number of drafted tokens, 0 to MAX_ROWS - 1, then the tokens; not read with several texts
// state         int, the step's (step_rows.cl)       tokens  int [.]: each text's last sampled token
// texts         int: the texts' step state, with TEXT_SLOTS per record, the first at TEXTS
// sampling      int [texts][SAMPLING_SLOTS], row_sampling [rows][SAMPLING_SLOTS]
// rows          int: a step state for MAX_ROWS sequences, one per row: ROW_RECORD_SLOTS each, the first at ROW_RECORDS
//
// Index space: one group, local size MAX_ROWS. Build: MAX_ROWS, SAMPLING_SLOTS, TEXTS, TEXT_SLOTS, ROW_RECORDS, ROW_RECORD_SLOTS,
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

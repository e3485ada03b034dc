// Accepts the drafted tokens of each text as long as they are what the row before sampled, and leaves the text after them: the end
// of a step that verifies drafts. Then a text is as if each token had been sampled by a step of its own.
//
// Of a text with the rows 0 .. m - 1, of which row i has the token t[i] and sampled s[i]:
//
//   a = the largest number with t[i + 1] = s[i] for all i < a;   a + 1 tokens were sampled: s[0] to s[a]
//   accepted = a + 1, s[0], ..., s[a], of m + 1 places, one text after the other in the order of their rows
//   tokens[text] = s[a];   of the text: position += a + 1, step += a + 1, n_tokens = 1
//
// row_sampled  int [n]: what each row sampled; VOCAB where it could choose none
// state        int, of the step (step_rows.cl), with n rows      tokens  int [.]: see draft_rows.cl
// texts        int, see draft_rows.cl; of a step of one text its state
// last_seen    int [texts][VOCAB]: the latest position of each token, of which those of the rows 0 to a are new
// counts       int [texts][VOCAB]: how often the answer has each token, of which s[0] to s[a] are new
// accepted     int [n + texts]
//
// Index space: one group of MAX_ROWS, at least n; the first row of each text has it. Local memory: 12 MAX_ROWS bytes.
// Build: VOCAB, MAX_ROWS, TEXTS, TEXT_SLOTS, those of the step state.
#if !defined(VOCAB) || !defined(MAX_ROWS) || !defined(TEXTS) || !defined(TEXT_SLOTS) || !defined(STATE_STEP)
#error "accept_draft.cl needs the build constants VOCAB, MAX_ROWS, TEXTS, TEXT_SLOTS and those of the step state"
#endif
#include "common/step_rows.cl"

__kernel __attribute__((reqd_work_group_size(MAX_ROWS, 1, 1)))
void accept_draft(__global const int* row_sampled, __global const int* state, __global int* tokens, __global int* texts,
                  __global int* last_seen, __global int* counts, __global int* accepted) {
    __local int row_tokens[MAX_ROWS], sampled[MAX_ROWS], before[MAX_ROWS];  // before: rows of the text before this one
    const int r = get_local_id(0), n = state[STATE_N_TOKENS], row = min(r, n - 1);
    const int place = sequence_of(state, row), position = row_position(state, row);
    __global int* text = texts + TEXTS + place * TEXT_SLOTS;
    row_tokens[r] = row_token(tokens, state, row);
    sampled[r] = row_sampled[row];
    before[r] = r < n ? position - text[STATE_POSITION] : 0;
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);  // all have read what changes now
    if (r >= n || before[r] > 0) return;
    int taken = 1, texts_before = 0;
    for (int i = 0; i < r; ++i) texts_before += before[i] == 0;
    while (r + taken < n && before[r + taken] > 0 && row_tokens[r + taken] == sampled[r + taken - 1]) ++taken;
    accepted += r + texts_before;
    last_seen += (size_t)place * VOCAB;
    counts += (size_t)place * VOCAB;
    accepted[0] = taken;
    for (int i = 0; i < taken; ++i) {
        const int token = sampled[r + i];
        accepted[1 + i] = token;
        last_seen[row_tokens[r + i]] = position + i;
        if (token < VOCAB) atomic_inc(counts + token);  // nobody waits for an atomic's result
    }
    tokens[place] = min(sampled[r + taken - 1], VOCAB - 1);
    text[STATE_POSITION] = position + taken;
    text[STATE_N_TOKENS] = 1;
    text[STATE_STEP] += taken;
}

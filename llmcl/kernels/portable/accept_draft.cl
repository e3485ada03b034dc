// Accepts each text's drafted tokens as long as they equal the previous row's sample, and moves the text past the accepted tokens.
// Ends a step that verifies drafts. The text is then in the same state as after sampling the tokens one step at a time.
//
// For a text with rows 0 .. m - 1; row i has the token t[i] and sampled s[i]:
//
//   a = the largest number with t[i + 1] = s[i] for all i < a;   a + 1 tokens were sampled: s[0] to s[a]
//   accepted = a + 1, s[0], ..., s[a] in m + 1 places; texts follow each other in row order
//   tokens[text] = s[a];   in the text's state: position += a + 1, step += a + 1, n_tokens = 1
//
// row_sampled  int [n]: each row's sample; VOCAB if no token could be chosen
// state        int, the step's (step_rows.cl), with n rows       tokens  int [.]: see draft_rows.cl
// texts        int, see draft_rows.cl; with a single text its state
// last_seen    int [texts][VOCAB]: each token's latest position; updated for rows 0 to a
// counts       int [texts][VOCAB]: each token's count in the answer; updated for s[0] to s[a]
// accepted     int [n + texts]
//
// Index space: one group with MAX_ROWS >= n work-items; each text's first row does the work. Local memory: 12 MAX_ROWS bytes.
// Build: VOCAB, MAX_ROWS, TEXTS, TEXT_SLOTS, step state constants.
#if !defined(VOCAB) || !defined(MAX_ROWS) || !defined(TEXTS) || !defined(TEXT_SLOTS) || !defined(STATE_STEP)
#error "accept_draft.cl needs the build constants VOCAB, MAX_ROWS, TEXTS, TEXT_SLOTS and those of the step state"
#endif
#include "common/step_rows.cl"

__kernel __attribute__((reqd_work_group_size(MAX_ROWS, 1, 1)))
void accept_draft(__global const int* row_sampled, __global const int* state, __global int* tokens, __global int* texts,
                  __global int* last_seen, __global int* counts, __global int* accepted) {
    __local int row_tokens[MAX_ROWS], sampled[MAX_ROWS], before[MAX_ROWS];  // before: number of earlier rows in the text
    const int r = get_local_id(0), n = state[STATE_N_TOKENS], row = min(r, n - 1);
    const int place = sequence_of(state, row), position = row_position(state, row);
    __global int* text = texts + TEXTS + place * TEXT_SLOTS;
    row_tokens[r] = row_token(tokens, state, row);
    sampled[r] = row_sampled[row];
    before[r] = r < n ? position - text[STATE_POSITION] : 0;
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);  // all have read the state before it changes
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

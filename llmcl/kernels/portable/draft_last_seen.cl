// Each token's latest position as seen by each row in a step, for the repetition penalty. A row sees itself and the text's earlier
// rows, not the later rows.
//
//   out[r][v] = the largest position among rows i <= r in the same text with the token v, or last_seen[text][v] without such a row
//
// state      int, the step's (step_rows.cl)     tokens  int [.]: see draft_rows.cl
// texts      int, see draft_rows.cl
// last_seen  int [texts][VOCAB]: latest positions before the step, negative: never
// out        int [n][VOCAB]
//
// Index space: (ceil(VOCAB / (LOCAL_SIZE RUN)), n), local size LOCAL_SIZE; each work-item has RUN neighbouring tokens in the
// vocabulary. Build: VOCAB, RUN, LOCAL_SIZE, TEXTS, TEXT_SLOTS, step state constants.
#if !defined(VOCAB) || !defined(RUN) || !defined(LOCAL_SIZE) || !defined(TEXTS) || !defined(TEXT_SLOTS) || !defined(STATE_POSITION)
#error "draft_last_seen.cl needs the build constants VOCAB, RUN, LOCAL_SIZE, TEXTS, TEXT_SLOTS and those of the step state"
#endif
#include "common/step_rows.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void draft_last_seen(__global const int* state, __global const int* tokens, __global const int* texts,
                     __global const int* last_seen, __global int* out) {
    const int r = get_group_id(1), first = get_global_id(0) * RUN, end = min(VOCAB, first + RUN);
    const int place = sequence_of(state, r), before = row_position(state, r) - texts[TEXTS + place * TEXT_SLOTS + STATE_POSITION];
    out += (size_t)r * VOCAB;
    last_seen += (size_t)place * VOCAB;
    for (int v = first; v < end; ++v) out[v] = last_seen[v];
    for (int i = r - before; i <= r; ++i) {
        const int token = row_token(tokens, state, i);
        if (first <= token && token < end) out[token] = row_position(state, i);
    }
}

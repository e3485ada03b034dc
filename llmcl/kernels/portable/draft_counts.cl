// Each token's count in the answer as seen by each row in a step, for presence and frequency penalty. A text's first row is the token
// sampled last, already counted; a row sees itself and the drafted rows before it.
//
//   out[r][v] = counts[text][v] + number of rows i <= r in the same text, without its first, with the token v
//
// state, texts  int, see draft_rows.cl     tokens  int [.], likewise
// counts        int [texts][VOCAB]         out     int [n][VOCAB]
//
// Index space: (ceil(VOCAB / (LOCAL_SIZE RUN)), n), local size LOCAL_SIZE; each work-item has RUN neighbouring tokens in the
// vocabulary. Build: VOCAB, RUN, LOCAL_SIZE, TEXTS, TEXT_SLOTS, step state constants.
#if !defined(VOCAB) || !defined(RUN) || !defined(LOCAL_SIZE) || !defined(TEXTS) || !defined(TEXT_SLOTS) || !defined(STATE_POSITION)
#error "draft_counts.cl needs the build constants VOCAB, RUN, LOCAL_SIZE, TEXTS, TEXT_SLOTS and those of the step state"
#endif
#include "common/step_rows.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void draft_counts(__global const int* state, __global const int* tokens, __global const int* texts,
                  __global const int* counts, __global int* out) {
    const int r = get_group_id(1), first = get_global_id(0) * RUN, end = min(VOCAB, first + RUN);
    const int place = sequence_of(state, r), before = row_position(state, r) - texts[TEXTS + place * TEXT_SLOTS + STATE_POSITION];
    out += (size_t)r * VOCAB;
    counts += (size_t)place * VOCAB;
    for (int v = first; v < end; ++v) out[v] = counts[v];
    for (int i = r - before + 1; i <= r; ++i) {
        const int token = row_token(tokens, state, i);
        if (first <= token && token < end) out[token] += 1;
    }
}

// The latest position of each token as each row of a step knows it, for the repetition penalty: a row knows itself and the rows
// before it, and nothing of those after it.
//
//   out[r][v] = the largest position + i with i <= r and tokens[i] = v, or where there is none last_seen[v]
//
// state      int, see STATE_*          tokens  int [n], of the step
// last_seen  int [VOCAB]: latest positions before the step, negative: never
// out        int [n][VOCAB]
//
// Index space: (ceil(VOCAB / (LOCAL_SIZE RUN)), n), LOCAL_SIZE work-items a group, each with RUN neighbouring tokens of the
// vocabulary. Build: VOCAB, RUN, LOCAL_SIZE, those of the step state.
#if !defined(VOCAB) || !defined(RUN) || !defined(LOCAL_SIZE) || !defined(STATE_POSITION)
#error "draft_last_seen.cl needs the build constants VOCAB, RUN, LOCAL_SIZE and those of the step state"
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void draft_last_seen(__global const int* state, __global const int* tokens, __global const int* last_seen,
                     __global int* out) {
    const int r = get_group_id(1), first = get_global_id(0) * RUN, end = min(VOCAB, first + RUN);
    out += (size_t)r * VOCAB;
    for (int v = first; v < end; ++v) out[v] = last_seen[v];
    for (int i = 0; i <= r; ++i)
        if (first <= tokens[i] && tokens[i] < end) out[tokens[i]] = state[STATE_POSITION] + i;
}

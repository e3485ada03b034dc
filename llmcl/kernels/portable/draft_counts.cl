// How often the answer has each token as each row of a step knows it, for presence and frequency penalty: row 0 is the token
// sampled last, which is counted already, and a row knows itself and the drafted ones before it.
//
//   out[r][v] = counts[v] + number of i with 1 <= i <= r and tokens[i] = v
//
// tokens  int [n], of the step          counts  int [VOCAB]          out  int [n][VOCAB]
//
// Index space: (ceil(VOCAB / (LOCAL_SIZE RUN)), n), LOCAL_SIZE work-items a group, each with RUN neighbouring tokens of the
// vocabulary. Build: VOCAB, RUN, LOCAL_SIZE.
#if !defined(VOCAB) || !defined(RUN) || !defined(LOCAL_SIZE)
#error "draft_counts.cl needs the build constants VOCAB, RUN and LOCAL_SIZE"
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void draft_counts(__global const int* tokens, __global const int* counts, __global int* out) {
    const int r = get_group_id(1), first = get_global_id(0) * RUN, end = min(VOCAB, first + RUN);
    out += (size_t)r * VOCAB;
    for (int v = first; v < end; ++v) out[v] = counts[v];
    for (int i = 1; i <= r; ++i)
        if (first <= tokens[i] && tokens[i] < end) out[tokens[i]] += 1;
}

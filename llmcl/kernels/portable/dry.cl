// DRY ("don't repeat yourself"): lowers the logits of tokens that would continue a repetition in the text.
//
//   logits[t] -= multiplier base^(L - allowed length),   at most MAX_PENALTY
//
// L is the length of the longest end of the text that also stands before an earlier t. A match stays within the last
// DRY_PENALTY_LAST_N tokens and behind the last breaker. It has at least the allowed length.
//
// runs[d] counts the last tokens that equal the tokens d places before them. Each new token extends the runs:
//
//   runs[d] = text[last] == text[last - d] ? runs[d] + 1 : 0
//
// so a step reads the window once. Runs that belong to another position are counted anew.
//
// logits   float [VOCAB] per row (step_rows.cl); per sequence:
// tokens   int: the step's input, if the host did not write it to `text`
// text     int [context]: tokens by position      runs     int [context]
// records  int [4]: tokens in `text`, tokens that `runs` are for, whether there are breakers, 0
// longest  int [VOCAB], 0 before and after a step: 1 + L by token
// heads    int [VOCAB]: where the rule of the breakers that begin with a token starts in `rules`; 0: none. Negative if
//          the token alone is a breaker.
// rules    int [MAX_RULES]: number of tails, then each tail's length and tokens, the longest first. `rules[0]` is unused.
// remaining buffers: see sample.cl. The order is llama.cpp's: DRY follows the penalties. The sampling kernels apply
// the repetition penalty to what stands here, so this kernel writes the value that becomes right by that.
//
// Index space: one group of LOCAL_SIZE; with several sequences, for each row.
// Build: as sample.cl, MAX_RULES, MAX_PENALTY, MAX_TAIL (the longest tail).
#if !defined(VOCAB) || !defined(LOCAL_SIZE) || !defined(MAX_RULES) || !defined(MAX_PENALTY) || !defined(MAX_TAIL) || !defined(STATE_STEP) || \
    !defined(SAMPLING_DRY_MULTIPLIER)
#error "dry.cl needs the build constants VOCAB, LOCAL_SIZE, MAX_RULES, MAX_PENALTY, MAX_TAIL and those of the step state"
#endif
#include "portable/token_scores.cl"

inline int reduce_max_int(const int v, __local int* scratch, const int lid) REDUCED(int, max)

// The length of the longest breaker's tail whose head stands i tokens before the end; -1 if no breaker begins there.
inline int tail_at(const int i, __global const int* text, const int last, __global const int* heads,
                   __global const int* rules) {
    const int head = heads[text[last - i]];
    if (head == 0) return -1;
    __global const int* rule = rules + abs(head);
    for (int left = *rule++; left > 0; --left) {
        const int n = *rule++;
        bool matches = n <= i;
        for (int k = 0; matches && k < n; ++k) matches = rule[k] == text[last - i + 1 + k];
        if (matches) return n;
        rule += n;
    }
    return -1;
}

// How many tokens follow the last breaker in the window; `window` if there is none.
inline int after_breaker(const int window, __global const int* text, const int last, __global const int* heads,
                         __global const int* rules, __local int* scratch, const int lid) {
    int own = window, tail = -1;  // the work-item's nearest breaker
    for (int i = lid; i < window && tail < 0; i += LOCAL_SIZE) {
        own = i;
        tail = tail_at(i, text, last, heads, rules);
    }
    const int nearest = -reduce_max_int(tail < 0 ? -window : -own, scratch, lid);
    const int length = reduce_max_int(own == nearest ? tail : -1, scratch, lid);
    return length < 0 ? window : nearest - length;
}

// The length of a match as far as it counts.
inline int counted(const int run, const int d, const int window, const int limit) { return min(min(run, window - d), limit); }

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void dry(__global float* logits, __global const int* last_seen, __global const int* state, __global const int* sampling,
         __global const int* tokens, __global int* text, __global int* runs, __global int* records, __global int* longest,
         __global const int* heads, __global const int* rules, const int context) {
    LOCAL_SCRATCH(int, scratch);
    const int lid = get_local_id(0), row = step_row(1), sequence = sequence_of(state, row);
    sampling += sequence * SAMPLING_SLOTS;
    const float multiplier = as_float(sampling[SAMPLING_DRY_MULTIPLIER]), base = as_float(sampling[SAMPLING_DRY_BASE]);
    const int allowed = sampling[SAMPLING_DRY_ALLOWED_LENGTH], wanted = sampling[SAMPLING_DRY_PENALTY_LAST_N];
    if (multiplier == 0.0f) return;
    logits += (size_t)row * VOCAB;
    last_seen += (size_t)sequence * VOCAB;
    longest += (size_t)sequence * VOCAB;
    heads += (size_t)sequence * VOCAB;
    rules += sequence * MAX_RULES;
    text += (size_t)sequence * context;
    runs += (size_t)sequence * context;
    records += 4 * sequence;
    const int last = last_position(sequence_state(state, row)), n = last + 1, window = wanted < 0 ? n : min(n, wanted);
    const int n_known = records[0], n_matched = records[1], has_breakers = records[2];
    barrier(CLK_GLOBAL_MEM_FENCE);  // all have read the record
    if (lid == 0) {
        if (last >= n_known) text[last] = tokens[sequence];
        records[0] = records[1] = n;
    }
    barrier(CLK_GLOBAL_MEM_FENCE);

    const int most = base > 1.000001f ? allowed + 1 + (int)(88.7228391f / log(base)) : n;  // base^more would be infinite
    const int token = text[last];
    int run_of_all = 0;
    for (int d = 1 + lid; d < window; d += LOCAL_SIZE) {
        int run = 0;
        if (n_matched == last) {
            if (text[last - d] == token) run = 1 + (d < last ? runs[d] : 0);
        } else {
            while (run < most && run <= last - d && text[last - run] == text[last - d - run]) ++run;
        }
        runs[d] = run;
        run_of_all = max(run_of_all, min(run, window - d));
    }
    run_of_all = reduce_max_int(run_of_all, scratch, lid);
    const int reach = has_breakers ? min(window, run_of_all + MAX_TAIL) : 0;  // breakers further away don't matter
    const int after = after_breaker(reach, text, last, heads, rules, scratch, lid);
    const int limit = after < reach ? after : window, end = run_of_all >= allowed && limit >= allowed ? window : 0;

    for (int d = 1 + lid; d < end; d += LOCAL_SIZE) {
        const int length = counted(runs[d], d, window, limit);
        if (length >= allowed) atomic_max(longest + text[n - d], length + 1);
    }
    barrier(CLK_GLOBAL_MEM_FENCE);
    for (int d = 1 + lid; d < end; d += LOCAL_SIZE) {
        const int next = text[n - d];
        const int length = counted(runs[d], d, window, limit) < allowed ? -1 : atomic_xchg(longest + next, 0) - 1;
        if (length < 0 || (has_breakers && heads[next] < 0)) continue;
        const float penalty = fmin(multiplier * pow(base, (float)(length - allowed)), MAX_PENALTY);
        const float l = repeat_penalized(logits[next], last_seen, sampling, last, next) - penalty;
        const bool repeats = repeat_penalized(1.0f, last_seen, sampling, last, next) != 1.0f;
        const float r = as_float(sampling[SAMPLING_REPEAT_PENALTY]);
        logits[next] = !repeats ? l : l > 0.0f ? l * r : l / r;
    }
}

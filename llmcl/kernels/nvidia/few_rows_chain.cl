// Products of few rows, norms, biases, attention, appended keys and experts, one after the other, in one launch: each takes what the
// one before it left (nvidia/linear_few_rows.cl, rms_norm_token.cl, adjust_heads.cl, attention_decode.cl, attention_short_prompt.cl,
// rope_append.cl, router_few_rows.cl, choose_few_rows.cl, experts_few_rows.cl).
//
//     group    0 1 2 .. | .. .. | ..          index space: the groups of the links in turn
//     link        0     |   1   | 2
//
// A group asks for the weights or keys that it takes first, and then waits until all groups of the link before are done. So the memory
// is busy while a product ends. The product after gate and up waits for equal parts of its columns, one after the other. Groups begin
// in the order of their numbers, so that whoever waits, waits for groups that run. A wait that lasts all the same ends the launch with
// an error (nvidia/wait_until.cl).
//
// What a link reads that is written in this launch, the one before it has written, or one before that; and all groups of a
// link have read before the next one writes. So no memory is written that is still read.
//
// done   uint [32 N_COUNTERS], 0 before and after a launch: of each link the groups that are done, or of each part of its results;
//        each in a line of its own
// The other arguments are those of the links in turn, PARAMS.
//
// Index space: N_UNITS groups of ITEMS. Build: ITEMS, N_COUNTERS, LAST_GROUPS (those of the last link), CHAIN_BYTES, CHAIN_ROWS, and in
// front of the file the links as functions, PARAMS, POINTERS (as many as a link has arguments), CHOOSE_LINK(unit), which says what
// is declared below, and RUN_LINK, a call of the function number `kind`. Local memory: CHAIN_BYTES and 4 CHAIN_ROWS.
#if !defined(ITEMS) || !defined(N_COUNTERS) || !defined(LAST_GROUPS) || !defined(CHAIN_BYTES) || !defined(CHAIN_ROWS)
#error "nvidia/few_rows_chain.cl needs the build constants named in its head"
#endif

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
void few_rows_chain(volatile __global uint* done PARAMS) {
    __local uint4 __attribute__((aligned(128))) buffers[CHAIN_BYTES / 16];
    __local float scales[CHAIN_ROWS];
    const uint unit = get_group_id(0);
    int kind = 0, first = 0, part_groups = 1;  // the function of the group's link, its first group, the groups of a part
    int counter = 0, counter_before = 0;       // the first of the link, and of the one before it
    uint count = 0;                            // what those before come to
    __global uchar POINTERS;                   // the link's arguments
    CHOOSE_LINK(unit)
    const int group = (int)unit - first;
    volatile __global const uint* before = done + counter_before * COUNTER_WORDS;
    RUN_LINK
    barrier(CLK_LOCAL_MEM_FENCE);
    if (get_local_id(0) > 0) return;
    done += (counter + group / part_groups) * COUNTER_WORDS;
    if (counter < N_COUNTERS - 1) {
        report_done(done);
    } else if (atomic_inc(done) == LAST_GROUPS - 1) {  // whose groups have waited for all others
        for (int i = 0; i < N_COUNTERS; ++i) done[-i * COUNTER_WORDS] = 0;
    }
}

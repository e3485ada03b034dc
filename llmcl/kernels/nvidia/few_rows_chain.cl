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
// What a group does it has from a table: the program is the same for any number of layers, and small. Code that is read once in a layer
// would come from the second-level cache, a line at a time.
//
// done   uint [32 n_counters], 0 before and after a launch: of each link the groups that are done, or of each part of its results;
//        each in a line of its own
// firsts int [n_links], the first group of each link
// links  ulong [n_links][LINK_WORDS]: six ints in three words, LINK_INTS, and the addresses of the link's buffers
//
// Index space: as many groups of ITEMS as the links have. Build: ITEMS, LINK_WORDS, CHAIN_BYTES, CHAIN_ROWS, and in front of the file
// the links as functions and RUN_LINK, a call of the function number `kind`. Local memory: CHAIN_BYTES and 4 CHAIN_ROWS.
#if !defined(ITEMS) || !defined(LINK_WORDS) || !defined(CHAIN_BYTES) || !defined(CHAIN_ROWS)
#error "nvidia/few_rows_chain.cl needs the build constants named in its head"
#endif

// The link that a group is of: the last one whose first group is not behind it. For whole warps.
inline int link_of(__global const int* firsts, const int n_links, const int group) {
    const int lane = get_local_id(0) % WARP, step = (n_links + WARP - 1) / WARP;
    const int from = (warp_count(lane * step < n_links && firsts[min(lane * step, n_links - 1)] <= group) - 1) * step;
    int before = 0;
#pragma unroll 1
    for (int i = lane; i - lane < step; i += WARP)
        before += warp_count(i < step && from + i < n_links && firsts[min(from + i, n_links - 1)] <= group);
    return from + before - 1;
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
void few_rows_chain(volatile __global uint* done, __global const int* firsts, __global const ulong* links, const int n_links,
                    const int n_counters, const int last_groups) {
    __local uint4 __attribute__((aligned(128))) buffers[CHAIN_BYTES / 16];
    __local float scales[CHAIN_ROWS];
    const int unit = get_group_id(0);
    __global const ulong* link = links + (size_t)link_of(firsts, n_links, unit) * LINK_WORDS;
    __global const int* ints = (__global const int*)link;
    // The function of the link, its first group, the groups of a part; its first counter, that of the link before, and what those come to.
    const int kind = ints[0], group = unit - ints[1], part_groups = ints[2], counter = ints[3];
    volatile __global const uint* before = done + ints[4] * COUNTER_WORDS;
    const uint count = ints[5];
    RUN_LINK
    barrier(CLK_LOCAL_MEM_FENCE);
    if (get_local_id(0) > 0) return;
    const int own = counter + group / part_groups;
    if (own < n_counters - 1) {
        report_done(done + own * COUNTER_WORDS);
    } else if (atomic_inc(done + own * COUNTER_WORDS) == last_groups - 1) {  // whose groups have waited for all others
#pragma unroll 1
        for (int i = 0; i < n_counters; ++i) done[i * COUNTER_WORDS] = 0;
    }
}

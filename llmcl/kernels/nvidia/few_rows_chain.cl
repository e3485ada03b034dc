// Products with few rows, norms, biases, attention, KV appends and experts, one after the other, in a single launch. Each link
// reads the previous link's results (nvidia/linear_few_rows.cl, rms_norm_token.cl, adjust_heads.cl, attention_decode.cl,
// attention_short_prompt.cl, rope_append.cl, router_few_rows.cl, choose_few_rows.cl, experts_few_rows.cl).
//
//     group    0 1 2 .. | .. .. | ..          index space: the groups of the links in turn
//     link        0     |   1   | 2
//
// A group first requests its weights or keys, and then waits until all groups of the previous link are done. Memory stays busy
// while a product ends. The product after gate and up waits for equal parts of its columns, part by part. Groups begin in numerical
// order, so a waiting group always waits for running groups. A wait that still lasts too long ends the launch with an error
// (nvidia/wait_until.cl).
//
// A link only reads results of the previous link or of earlier links, and all groups of a link have finished reading before the
// next link writes. No memory is overwritten while it is still being read.
//
// A table tells each group its work: the program is small, and the same for any number of layers. Code that runs only once per
// layer would come from the L2 cache, a line at a time.
//
// done   uint [32 n_counters], 0 before and after a launch: finished groups per link, or per part of a link's results;
//        each counter in its own cache line
// firsts int [n_links], the first group of each link
// links  ulong [n_links][LINK_WORDS]: six ints in three words, LINK_INTS, and the addresses of the link's buffers
//
// Index space: as many groups as the links have, with ITEMS work-items. Build: ITEMS, LINK_WORDS, CHAIN_BYTES, CHAIN_ROWS. In front of
// the file stand the links as functions, and RUN_LINK, a call of function number `kind`. Local memory: CHAIN_BYTES and 4 CHAIN_ROWS.
#if !defined(ITEMS) || !defined(LINK_WORDS) || !defined(CHAIN_BYTES) || !defined(CHAIN_ROWS)
#error "nvidia/few_rows_chain.cl needs the build constants named in its head"
#endif

// Returns the link of a group: the last link whose first group is not behind the group. Called by whole warps.
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
    // The link's function, first group, groups per part; its first counter, the previous link's counter, and the count to wait for.
    const int kind = ints[0], group = unit - ints[1], part_groups = ints[2], counter = ints[3];
    volatile __global const uint* before = done + ints[4] * COUNTER_WORDS;
    const uint count = ints[5];
    RUN_LINK
    barrier(CLK_LOCAL_MEM_FENCE);
    if (get_local_id(0) > 0) return;
    const int own = counter + group / part_groups;
    if (own < n_counters - 1) {
        report_done(done + own * COUNTER_WORDS);
    } else if (atomic_inc(done + own * COUNTER_WORDS) == last_groups - 1) {  // the last link's groups have waited for all other groups
#pragma unroll 1
        for (int i = 0; i < n_counters; ++i) done[i * COUNTER_WORDS] = 0;
    }
}

// Kernels that follow one another, as those of a layer in decode, in one launch. Plain OpenCL C: no work-group needs to run at the same
// time as another.
//
//     number   0 1 2 .. | .. .. | ..          a work-group takes the next number, which says its link and its unit there:
//     link        0     |   1   | 2           what is a work-group of the link's own launch
//
// Work-groups take numbers in the order in which they begin, and wait only for lower ones (portable/await_links.cl). So who waits, waits
// for work-groups that have begun. A product has asked for its first weights before it waits: the memory is busy while a link ends.
//
// What a link reads that is written in this launch, the one before it has written, or one before that; and all work-groups of a
// link are done before the next one writes. So no memory is written that is still read.
//
// counters   uint [32 (1 + N_LINKS)], 0 before and after a launch, each in a line of its own: the next number; of each link the work-groups
//            that are done
// PARAMS     the buffers and numbers of the links
//
// Index space: the work-groups of all links, of ITEMS work-items. Build: ITEMS, N_LINKS, LAST_GROUPS (of the last link), CHAIN_BYTES (a
// multiple of 16); and in front of the file PARAMS, the links as functions, and RUN_LINK(number): a choice of them, which
// says in `link` which one it was. Local memory: CHAIN_BYTES and 4.
#if !defined(ITEMS) || !defined(N_LINKS) || !defined(LAST_GROUPS) || !defined(CHAIN_BYTES)
#error "portable/layer_chain.cl needs the build constants ITEMS, N_LINKS, LAST_GROUPS and CHAIN_BYTES"
#endif
#undef INTEL_LANES
#define INTEL_LANES 16  // as of the products
#define DONE(link) (counters + 32 * (1 + (link)))

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) REQUIRE_LANES
void layer_chain(volatile __global uint* counters PARAMS) {
    __local uint4 words[CHAIN_BYTES / 16];
    __local uint taken;
    __local uchar* const memory = (__local uchar*)words;
    if (get_local_id(0) == 0) taken = atomic_inc(counters);
    barrier(CLK_LOCAL_MEM_FENCE);
    const uint number = taken;
    int link = 0;
    RUN_LINK(number)
    const uint before = count_done(DONE(link));
    if (get_local_id(0) > 0 || link < N_LINKS - 1 || before < LAST_GROUPS - 1) return;
    // The last one: all others are done, those of the last link counted, and all numbers are taken.
    for (int i = 0; i <= N_LINKS; ++i) counters[32 * i] = 0;
}

// Runs consecutive kernels, such as a decode layer's, in one launch. Plain OpenCL C: no work-group needs to run at the same time as
// another.
//
//     number   0 1 2 .. | .. .. | ..          a work-group takes the next number, which selects its link and its unit there:
//     link        0     |   1   | 2           a unit is a work-group in the link's separate launch
//
// Work-groups take numbers in starting order and only wait for lower numbers (portable/await_links.cl). A waiting work-group therefore
// waits for work-groups that have started. A product requests its first weights before it waits: memory stays busy while a link ends.
//
// Data written and read in this launch passes from a link to the next or to the one after. A link's work-groups all finish before the
// next link writes, so no memory is overwritten while it is still read.
//
// counters   uint [32 (1 + N_LINKS)], 0 before and after a launch, each in its own cache line: the next number; per link the number of
//            finished work-groups
// PARAMS     the links' buffers and numbers
//
// Index space: all links' work-groups, local size ITEMS. Build: ITEMS, N_LINKS, LAST_GROUPS (work-groups in the last link), CHAIN_BYTES
// (a
// multiple of 16). Before the file: PARAMS, the links as functions, and RUN_LINK(number), which runs a link and stores its number in
// `link`. Local memory: CHAIN_BYTES and 4.
// says in `link` which one it was. Local memory: CHAIN_BYTES and 4.
#if !defined(ITEMS) || !defined(N_LINKS) || !defined(LAST_GROUPS) || !defined(CHAIN_BYTES)
#error "portable/layer_chain.cl needs the build constants ITEMS, N_LINKS, LAST_GROUPS and CHAIN_BYTES"
#endif
#undef INTEL_LANES
#define INTEL_LANES 16  // as in the products
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
    // The last work-group: all others are done, the last link's counted, and all numbers taken.
    for (int i = 0; i <= N_LINKS; ++i) counters[32 * i] = 0;
}

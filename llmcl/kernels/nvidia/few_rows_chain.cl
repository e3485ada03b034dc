// Products of few rows and norms, one after the other, in one launch: each takes what the one before it left (nvidia/linear_few_rows.cl,
// nvidia/rms_norm_token.cl).
//
//     group    0 1 2 .. | .. .. | ..          index space: the groups of the links in turn
//     link        0     |   1   | 2
//
// A group asks for the weights that it takes first, and then waits until all groups of the link before are done. So the memory
// is busy while a product ends. Groups begin in the order of their numbers, so that whoever waits, waits for groups that run. A wait
// that lasts all the same ends the launch with an error (nvidia/wait_until.cl).
//
// What a link reads that is written in this launch, the one before it has written, or one before that; and all groups of a
// link have read before the next one writes. So no memory is written that is still read.
//
// done   uint [32 N_LINKS], 0 before and after a launch: of each link the groups that are done; each in a line of its own
// The other arguments are those of the links in turn, PARAMS.
//
// Index space: N_UNITS groups of ITEMS. Build: ITEMS, N_LINKS, N_UNITS, LAST_GROUPS (those of the last link), CHAIN_BYTES, CHAIN_ROWS,
// and in front of the file PARAMS, the links as functions, and RUN_UNIT(unit): a choice of them, which says in `link` which one it
// was. Local memory: CHAIN_BYTES and 4 CHAIN_ROWS.
#if !defined(ITEMS) || !defined(N_LINKS) || !defined(LAST_GROUPS) || !defined(CHAIN_BYTES) || !defined(CHAIN_ROWS)
#error "nvidia/few_rows_chain.cl needs the build constants named in its head"
#endif
#define COUNTER(i) (done + 32 * (i))

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
void few_rows_chain(volatile __global uint* done PARAMS) {
    __local uint4 __attribute__((aligned(128))) buffers[CHAIN_BYTES / 16];
    __local float scales[CHAIN_ROWS];
    const uint unit = get_group_id(0);
    int link = 0;
    RUN_UNIT(unit)
    barrier(CLK_LOCAL_MEM_FENCE);
    if (get_local_id(0) > 0) return;
    if (link < N_LINKS - 1) {
        report_done(COUNTER(link));
    } else if (atomic_inc(COUNTER(link)) == LAST_GROUPS - 1) {  // whose groups have waited for all others
        for (int i = 0; i < N_LINKS; ++i) *COUNTER(i) = 0;
    }
}

// A list of launches in one, on a CPU: each entry of the list begins when all work-groups of the entries before it are done.
//
//   repeat: look at the next unit (a work-group of an entry)  |  wait until the entries before its own are done  |
//           claim it, or look again where another was quicker  |  RUN_ENTRY  |  count it as done
//
// Who waits holds no unit, and waits for units that others hold. So it may leave: who holds one goes on when that is done, if need be
// alone. Whichever work-groups of this kernel run, and however seldom, the list is done; who computes a unit does not change its result.
// One leaves when a wait is so long that the system must have taken a core away: it leaves its own to the one that all wait for.
//
// entries   ulong [n_entries][ENTRY_SLOTS]: which kernel, its work-groups in x and y, the turns of its loop that a wait for the entries
//           before may take, its arguments (addresses and ints)
// sync      uint [SYNC_SLOTS], 0 before the first entry and after the last
//
// Index space: work-groups of one work-item, as many as there are threads that compute. Its offset: the entries that are done at the end;
// those done by the launch before are not done again.
// Build: ENTRY_SLOTS. The host puts the kernels in front of the file as functions, and the macro
// RUN_ENTRY(kernel, place, at): a switch over them. place: work-group in x and y, number of them in x and y; at: arguments.
#if !defined(ENTRY_SLOTS) || !defined(RUN_ENTRY)
#error "cpu/one_launch.cl needs the build constant ENTRY_SLOTS and the macro RUN_ENTRY"
#endif

// Units that are done, units that are claimed, and work-groups that left; each in a cache line of its own.
#define SYNC_DONE 0
#define SYNC_CLAIMED 16
#define SYNC_LEFT 32

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void one_launch(__global const ulong* entries, const int n_entries, volatile __global uint* sync) {
    const int end = (int)get_global_offset(0);
    uint first = 0;  // unit of the entry
    uint left = 0;   // work-groups, when this one began to wait
    ulong waited = 0;
    for (int entry = 0;;) {
        const uint unit = sync[SYNC_CLAIMED];
        __global const ulong* at = entries + entry * ENTRY_SLOTS;
        for (; entry < end && unit - first >= (uint)(at[1] * at[2]); ++entry, at += ENTRY_SLOTS)
            first += (uint)(at[1] * at[2]);
        if (entry == end) break;
        if (sync[SYNC_DONE] < first) {
            if (waited == 0) left = sync[SYNC_LEFT];
            if (++waited <= at[3]) continue;
            if (atomic_cmpxchg(sync + SYNC_LEFT, left, left + 1) == left) return;
            waited = 0;  // another left: the core that it left may be enough
            continue;
        }
        waited = 0;
        if (atomic_cmpxchg(sync + SYNC_CLAIMED, unit, unit + 1) != unit) continue;
        mem_fence(CLK_GLOBAL_MEM_FENCE);
        const int i = unit - first, columns = (int)at[1];
        const int4 place = (int4)(i % columns, i / columns, columns, (int)at[2]);
        RUN_ENTRY((int)at[0], place, (at + 4));
        mem_fence(CLK_GLOBAL_MEM_FENCE);
        atomic_inc(sync + SYNC_DONE);
    }
    // The last work-group to leave makes the counters 0 again, which nobody looks at any more.
    if (atomic_inc(sync + SYNC_LEFT) != get_num_groups(0) - 1) return;
    sync[SYNC_LEFT] = 0;
    if (end < n_entries) return;
    sync[SYNC_DONE] = 0;
    sync[SYNC_CLAIMED] = 0;
}

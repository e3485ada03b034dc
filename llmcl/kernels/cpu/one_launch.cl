// A list of launches in one, on a CPU: each entry of the list begins when all work-groups of the entries before it are done.
//
//   repeat: claim the next unit (a work-group of an entry)  |  wait until the entries before its own are done  |  RUN_ENTRY
//
// A unit is claimed only by a work-group that runs, and waits only for units claimed before it: whichever work-groups of this
// kernel run at the same time, one or all, the list is done. Who computes a unit does not change its result.
//
// entries   ulong [n_entries][ENTRY_SLOTS]: which kernel, its work-groups in x and y, its arguments (addresses and ints)
// sync      uint [SYNC_SLOTS], 0 before and after but for SYNC_GAVE_UP, which becomes 1 where the waits of a work-group took
//           more than `patience` turns of their loop together: then all leave
// result    float [n_result]: what the launches compute; filled with NaN where they gave up
//
//
// Index space: work-groups of one work-item, as many as there are threads that compute. With an offset of 1 + e: as many as entry e
// has units, which is then run by itself without a look at `sync`.
// Build: ENTRY_SLOTS. The host puts the kernels in front of the file as functions, and the macro
// RUN_ENTRY(kernel, place, at): a switch over them. place: work-group in x and y, number of them in x and y; at: arguments.
#if !defined(ENTRY_SLOTS) || !defined(RUN_ENTRY)
#error "cpu/one_launch.cl needs the build constant ENTRY_SLOTS and the macro RUN_ENTRY"
#endif

// In a cache line of its own is what all wait for, what all claim from, and the rest.
#define SYNC_DONE 0
#define SYNC_CLAIMED 16
#define SYNC_LEFT 32
#define SYNC_GAVE_UP 33

// Whether `units` are done before patience, the turns of this work-group's waits that are left, ran out.
inline bool wait_for(volatile __global uint* sync, const uint units, uint* patience) {
    for (; sync[SYNC_DONE] < units; --*patience) {
        if (*patience == 0) sync[SYNC_GAVE_UP] = 1;
        if (sync[SYNC_GAVE_UP]) return false;
    }
    mem_fence(CLK_GLOBAL_MEM_FENCE);
    return true;
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void one_launch(__global const ulong* entries, const int n_entries, volatile __global uint* sync, __global float* result,
                const int n_result, uint patience) {
    const int alone = (int)get_global_offset(0) - 1;
    uint first = 0;  // unit of the entry
    for (int entry = max(alone, 0); entry < n_entries;) {
        const uint unit = alone < 0 ? atomic_inc(sync + SYNC_CLAIMED) : (uint)get_group_id(0);
        __global const ulong* at = entries + entry * ENTRY_SLOTS;
        while (entry < n_entries && unit - first >= (uint)(at[1] * at[2])) {
            first += (uint)(at[1] * at[2]);
            ++entry;
            at += ENTRY_SLOTS;
        }
        if (entry == n_entries || (alone < 0 && !wait_for(sync, first, &patience))) break;
        const int i = unit - first, columns = (int)at[1];
        const int4 place = (int4)(i % columns, i / columns, columns, (int)at[2]);
        RUN_ENTRY((int)at[0], place, (at + 3));
        if (alone >= 0) return;
        mem_fence(CLK_GLOBAL_MEM_FENCE);
        atomic_inc(sync + SYNC_DONE);
    }
    // The last work-group to leave makes the counters 0 again, which nobody looks at any more.
    if (atomic_inc(sync + SYNC_LEFT) != get_num_groups(0) - 1) return;
    if (sync[SYNC_GAVE_UP])
        for (int i = 0; i < n_result; ++i) result[i] = NAN;
    sync[SYNC_DONE] = 0;
    sync[SYNC_CLAIMED] = 0;
    sync[SYNC_LEFT] = 0;
}

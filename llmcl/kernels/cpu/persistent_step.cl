// A persistent kernel for CPUs, a list of launches in one: each entry begins when all work-groups of those before it are done. The list
// may be done several times in a row.
//
//   repeat: look at the next unit (a work-group of an entry)  |  wait until the entries before its own are done  |
//           claim it and count the unit before as done, or look again where another was quicker  |  RUN_ENTRY
//
// Who waits holds no unit, and waits for units that others hold. A wait that is longer than a unit should take means that the system
// has suspended a thread which holds one. The work-group that waits takes the unit over, where its kernel allows that (cpu/unit.cl).
// Else it leaves the launch, and its core to the one that all wait for. Whichever work-groups run, and however seldom, the list
// is done; who computes a unit does not change its result.
//
// entries   ulong [n_entries + 1][ENTRY_SLOTS]: which kernel; the spins of a wait for the entry before, after which a unit is taken
//           over, and after which the work-group leaves; arguments (addresses and ints). The last has the spins alone
// sizes     uint [max_rows][n_entries][3]: the work-groups of each entry in x, y and z, in a step of 1, 2, .. rows
// state     the step state, which has the rows of the step in ROWS_SLOT
// sync      uint [SYNC_SLOTS + 16 work-groups]: counters, 0 before the first entry and after the last; then for each work-group
//           the word of its unit (cpu/unit.cl), in a cache line of its own
//
// Index space: work-groups of one work-item, as many as there are threads that compute. Its offset: MAX_TIMES times the entries
// that are done at the end, plus how often they are done; 0: another launch goes on from there. Those done by the launch before are not done
// again.
// Build: ENTRY_SLOTS; MAX_TIMES; ROWS_SLOT; SYNC_SLOTS; MAX_GROUPS, above the number of work-groups, a power of two. The host puts the kernels in
// front of the file as functions, and the macro RUN_ENTRY(kernel, work_group, n_groups, own, word, at): a switch over them. work_group,
// n_groups: in x, y and z; own, word: see cpu/unit.cl; at: arguments.
#if !defined(ENTRY_SLOTS) || !defined(MAX_TIMES) || !defined(MAX_GROUPS) || !defined(RUN_ENTRY) || !defined(ROWS_SLOT) || \
    !defined(SYNC_SLOTS)
#error "cpu/persistent_step.cl needs the build constants ENTRY_SLOTS, MAX_GROUPS, MAX_TIMES, ROWS_SLOT, SYNC_SLOTS and the macro RUN_ENTRY"
#endif

// SYNC_UNITS: units that are done times DONE_ONE, plus units that are claimed and not done. Both are in one word, so that one
// atomic operation counts a unit as done and claims the next. SYNC_LEFT: work-groups that left, in a cache line of their own.
#define SYNC_UNITS 0
#define SYNC_LEFT 16
#define DONE_ONE ((uint)MAX_GROUPS)
#define ENTRY_HEAD 3

// The word of a unit before `first` that is this work-group's from now on, 0: there is none that may be taken over.
inline uint take_unit(volatile __global uint* sync, const uint first) {
    for (uint g = 0; g < get_num_groups(0); ++g) {
        volatile __global uint* held = sync + SYNC_SLOTS + 16 * g;
        const uint word = *held;
        if (word != 0 && !(word & UNIT_CLOSED) && UNIT_OF(word) < first && atomic_cmpxchg(held, word, UNIT_TAKEN) == word)
            return word;
    }
    return 0;
}

// The hint keeps a compiler from looking for work-items to put into the lanes of a vector, which took it seconds for nothing.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) __attribute__((vec_type_hint(float16)))
void persistent_step(__global const ulong* entries, __global const uint* sizes, const int n_entries, __global const int* state,
                     const int max_rows, volatile __global uint* sync) {
    const int end = (int)get_global_offset(0) / MAX_TIMES, times = (int)get_global_offset(0) % MAX_TIMES;
    volatile __global uint* own = sync + SYNC_SLOTS + 16 * get_group_id(0);
    __global const ulong* at = entries;
    __global const uint* size = sizes + (size_t)(clamp(state[ROWS_SLOT], 1, max_rows) - 1) * n_entries * 3;
    uint first = 0;  // unit of the entry
    uint left = 0;   // work-groups, when this one began to wait
    uint ended = 0;  // units that this work-group has to count as done
    ulong waited = 0, take_at = 0;
    ulong patience = 1;  // times the spins after which units are taken over, and the work-group leaves
    for (int entry = 0, left_times = times;;) {
        const uint seen = sync[SYNC_UNITS];
        const uint units = seen + ended * (DONE_ONE - 1u), done = units / DONE_ONE, unit = done + units % DONE_ONE;
        while (entry < end && unit - first >= size[0] * size[1] * size[2]) {
            first += size[0] * size[1] * size[2];
            ++entry;
            at += ENTRY_SLOTS;
            size += 3;
            if (entry == end && left_times > 1) {
                --left_times;
                entry = 0;
                at -= end * ENTRY_SLOTS;
                size -= end * 3;
            }
        }
        const bool claims = entry < end && done >= first;
        uint word = UNIT_WORD(unit);
        if (claims || ended) {
            RELEASE;
            if (atomic_cmpxchg(sync + SYNC_UNITS, seen, units + claims) != seen) continue;
            waited = ended = 0;
            if (!claims) continue;
        } else {
            if (done >= first) break;
            if (waited == 0) {
                left = sync[SYNC_LEFT];
                take_at = patience * at[1];
            }
            word = 0;
            if (++waited == take_at) {
                word = take_unit(sync, first);
                take_at += patience * at[1];
            }
            if (word == 0) {
                if (waited <= patience * at[2]) continue;
                if (entry == end) break;
                if (atomic_cmpxchg(sync + SYNC_LEFT, left, left + 1) == left) return;
                waited = 0;  // another left: the core that it left may be enough
                continue;
            }
            waited = 0;
        }
        ACQUIRE;
        // What was taken over is a unit of an entry before.
        __global const ulong* of = at;
        __global const uint* n = size;
        uint before = first;
        while (UNIT_OF(word) < before) {
            if (of == entries) {  // it is one of the time before
                of += end * ENTRY_SLOTS;
                n += end * 3;
            }
            of -= ENTRY_SLOTS;
            n -= 3;
            before -= n[0] * n[1] * n[2];
        }
        const uint i = UNIT_OF(word) - before;
        const uint3 n_groups = (uint3)(n[0], n[1], n[2]);
        const uint3 work_group = (uint3)(i % n_groups.x, i / n_groups.x % n_groups.y, i / n_groups.x / n_groups.y);
        RUN_ENTRY((int)of[0], work_group, n_groups, own, word, (of + ENTRY_HEAD));
        ended = atomic_xchg(own, 0) != UNIT_TAKEN;
        // So two that compute for longer do not take a unit from each other for ever. What was lost long ago does not count.
        patience = ended ? MAX(patience / 2, 1ul) : patience * 2;
    }
    // The last work-group to leave makes the counters 0 again, which nobody looks at any more.
    if (atomic_inc(sync + SYNC_LEFT) != get_num_groups(0) - 1) return;
    sync[SYNC_LEFT] = 0;
    if (times > 0) sync[SYNC_UNITS] = 0;
}

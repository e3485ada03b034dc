// A persistent kernel for CPUs, a list of launches in one: each entry begins when all work-groups of earlier entries are done. The list
// may run several times in a row.
//
//   repeat: look at the next unit (a work-group of an entry)  |  wait until earlier entries are done  |
//           claim the unit and count the previous unit as done, or look again if another group was quicker  |  RUN_ENTRY
//
// A waiting work-group holds no unit; it waits for units held by others. If a wait takes longer than a unit should, the system has
// suspended a thread with a unit. The waiting work-group takes the unit over, if the kernel allows that (cpu/unit.cl). Otherwise it
// leaves
// the launch and frees its core for the suspended thread. The list completes whichever work-groups run, and however seldom; results
// don't depend on who computes a unit.
//
// entries   ulong [n_entries + 1][ENTRY_SLOTS]: kernel number; spins to wait for the previous entry before taking a unit over, and
//           before leaving; arguments (addresses and ints). The last entry has only the spins
// sizes     uint [max_rows][n_entries][3]: each entry's work-groups in x, y and z, in a step with 1, 2, .. rows
// state     the step state, with the step's row count in ROWS_SLOT
// sync      uint [SYNC_SLOTS + 16 work-groups]: counters, 0 before the first entry and after the last; then for each work-group
//           the word of its unit (cpu/unit.cl), in its own cache line
//
// Index space: single-work-item groups, one per computing thread. Its offset: MAX_TIMES times the number of entries done at the end, plus
// the number of repetitions; 0: another launch continues from there. Entries done in the previous launch are not repeated.
// Build: ENTRY_SLOTS; MAX_TIMES; ROWS_SLOT; SYNC_SLOTS; MAX_GROUPS, a power of two above the number of work-groups. The host puts the
// kernels before
// the file as functions, and the macro RUN_ENTRY(kernel, work_group, n_groups, own, word, at): a switch over the kernels. work_group,
// n_groups: in x, y and z; own, word: see cpu/unit.cl; at: arguments.
#if !defined(ENTRY_SLOTS) || !defined(MAX_TIMES) || !defined(MAX_GROUPS) || !defined(RUN_ENTRY) || !defined(ROWS_SLOT) || \
    !defined(SYNC_SLOTS)
#error "cpu/persistent_step.cl needs the build constants ENTRY_SLOTS, MAX_GROUPS, MAX_TIMES, ROWS_SLOT, SYNC_SLOTS and the macro RUN_ENTRY"
#endif

// SYNC_UNITS: finished units times DONE_ONE, plus units claimed but not finished. A single word, so that one atomic operation
// counts a unit as done and claims the next. SYNC_LEFT: work-groups that left, in a separate cache line.
#define SYNC_UNITS 0
#define SYNC_LEFT 16
#define DONE_ONE ((uint)MAX_GROUPS)
#define ENTRY_HEAD 3

// Takes over a unit before `first` and returns its word, or 0 if none may be taken over.
inline uint take_unit(volatile __global uint* sync, const uint first) {
    for (uint g = 0; g < get_num_groups(0); ++g) {
        volatile __global uint* held = sync + SYNC_SLOTS + 16 * g;
        const uint word = *held;
        if (word != 0 && !(word & UNIT_CLOSED) && UNIT_OF(word) < first && atomic_cmpxchg(held, word, UNIT_TAKEN) == word)
            return word;
    }
    return 0;
}

// The hint stops a compiler from filling vector lanes with several work-items, a search that took seconds for nothing.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) __attribute__((vec_type_hint(float16)))
void persistent_step(__global const ulong* entries, __global const uint* sizes, const int n_entries, __global const int* state,
                     const int max_rows, volatile __global uint* sync) {
    const int end = (int)get_global_offset(0) / MAX_TIMES, times = (int)get_global_offset(0) % MAX_TIMES;
    volatile __global uint* own = sync + SYNC_SLOTS + 16 * get_group_id(0);
    __global const ulong* at = entries;
    __global const uint* size = sizes + (size_t)(clamp(state[ROWS_SLOT], 1, max_rows) - 1) * n_entries * 3;
    uint first = 0;  // the entry's first unit
    uint left = 0;   // work-groups that had left when this one began to wait
    uint ended = 0;  // finished units this work-group has yet to count
    ulong waited = 0, take_at = 0;
    ulong patience = 1;  // multiplies the spins before units are taken over, and before the work-group leaves
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
                waited = 0;  // another group left: the freed core may be enough
                continue;
            }
            waited = 0;
        }
        ACQUIRE;
        // A unit taken over belongs to an earlier entry.
        __global const ulong* of = at;
        __global const uint* n = size;
        uint before = first;
        while (UNIT_OF(word) < before) {
            if (of == entries) {  // the unit belongs to the previous repetition
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
        // Keeps two slow work-groups from taking a unit from each other forever. Old losses fade.
        patience = ended ? MAX(patience / 2, 1ul) : patience * 2;
    }
    // The last work-group to leave resets the counters; nobody reads them any more.
    if (atomic_inc(sync + SYNC_LEFT) != get_num_groups(0) - 1) return;
    sync[SYNC_LEFT] = 0;
    if (times > 0) sync[SYNC_UNITS] = 0;
}

// Waiting in a launch for work-groups that began before.
//
// A counter has the work-groups of a link that are done. `first` and `second` are those of the two links before; a number of 0: there is
// none to wait for. What work-groups write before they are counted is there after the wait, since both sides stand at a fence of the
// whole device in between. OpenCL C 1.2 has no such fence. NVIDIA's compiler makes one of write_mem_fence (membar.gl), while its
// mem_fence is one of the work-group (membar.cta). A fence of some work-items serves those that they meet at a barrier.
#define DEVICE_FENCE write_mem_fence(CLK_GLOBAL_MEM_FENCE)
#define POLLING 32  // neighbours that run in step: they see the same number and leave the loop together

typedef struct {
    volatile __global const uint *first, *second;
    uint n_first, n_second;
} awaited;

inline void await_links(const awaited* links) {
    if (links->n_first == 0) return;  // known to the compiler
    if (get_local_id(0) < POLLING) {
        while ((*links->first < links->n_first) | (*links->second < links->n_second)) {
        }
        DEVICE_FENCE;
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
}

// By all work-items. Then what they have written is there for others, and `counter` says so. The number that it had before, for the first
// of them.
inline uint count_done(volatile __global uint* counter) {
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (get_local_id(0) < POLLING) DEVICE_FENCE;
    return get_local_id(0) == 0 ? atomic_inc(counter) : 0;
}

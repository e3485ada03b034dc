// Waits within a launch for work-groups that started earlier.
//
// A counter holds the number of finished work-groups in a link (a fused kernel). `first` and `second` are the counters for the two
// previous
// links; a count of 0 means no wait. Everything a work-group writes before it is counted is visible after the wait, because both sides
// pass
// a device-wide fence in between. OpenCL C 1.2 has no such fence. NVIDIA's compiler turns write_mem_fence into a device-wide fence
// (membar.gl),
// but mem_fence into a work-group fence (membar.cta). A fence executed by some work-items covers the whole work-group through a barrier.
#define DEVICE_FENCE write_mem_fence(CLK_GLOBAL_MEM_FENCE)
#define POLLING 32  // neighbours in lockstep: all see the same count and leave the loop together

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

// Called by all work-items. Publishes the group's writes and increments `counter`. Returns the previous count to the first work-item.
inline uint count_done(volatile __global uint* counter) {
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (get_local_id(0) < POLLING) DEVICE_FENCE;
    return get_local_id(0) == 0 ? atomic_inc(counter) : 0;
}

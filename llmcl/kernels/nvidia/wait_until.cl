// Waiting for other groups of a launch until `done` is `count`; after MOST_POLLS in vain the launch ends with the driver's error. What
// they have written before `report_done` is then there, for all work-items of the group or of the warp that has waited; it is to be
// loaded past the first-level cache.
#define MOST_POLLS (1 << 18)  // some tenths of a second

inline uint load_acquire(volatile __global const uint* p) {
    uint v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// For all lanes of a warp, none of which leaves the loop alone.
inline void warp_wait_until(volatile __global const uint* done, const uint count) {
    int polls = 0;
    while (polls < MOST_POLLS && !warp_any(load_acquire(done) >= count)) ++polls;
    if (polls == MOST_POLLS) asm volatile("trap;");
}

inline void wait_until(volatile __global const uint* done, const uint count) {
    if (count > 0 && get_local_id(0) < WARP) warp_wait_until(done, count);
    barrier(CLK_LOCAL_MEM_FENCE);
}

// By one work-item after a barrier: its group is done. Nobody waits for the answer.
inline void report_done(volatile __global uint* done) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" : : "l"(done) : "memory");
}

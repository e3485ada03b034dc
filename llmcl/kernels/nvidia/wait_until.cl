// Waits for other groups in a launch until `done` equals `count`. After MOST_POLLS polls in vain the launch ends with the driver's
// error. After the wait, everything written before `report_done` is visible to all work-items in the waiting group or warp; load it
// with the L1 cache bypassed.
#define MOST_POLLS (1 << 18)  // some tenths of a second

inline uint load_acquire(volatile __global const uint* p) {
    uint v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// Called by all lanes in a warp; no lane leaves the loop alone.
inline void warp_wait_until(volatile __global const uint* done, const uint count) {
    int polls = 0;
    while (polls < MOST_POLLS && !warp_any(load_acquire(done) >= count)) ++polls;
    if (polls == MOST_POLLS) asm volatile("trap;");
}

inline void wait_until(volatile __global const uint* done, const uint count) {
    if (count > 0 && get_local_id(0) < WARP) warp_wait_until(done, count);
    barrier(CLK_LOCAL_MEM_FENCE);
}

// Called by one work-item after a barrier: reports the group as done. Does not wait for an answer.
inline void report_done(volatile __global uint* done) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" : : "l"(done) : "memory");
}

// REDUCE(name, type, join) defines name(v, scratch, lid) -> v of all work-items of a group joined in pairs, in each of them.
//
// scratch  LOCAL_SIZE values in local memory, which may hold what is still read: a barrier comes before the first write.
// Build: LOCAL_SIZE (a power of two).
#if LOCAL_SIZE > 1
#define REDUCE(name, type, join)                                                      \
    inline type name(const type v, __local type* scratch, const int lid) {            \
        barrier(CLK_LOCAL_MEM_FENCE);                                                 \
        scratch[lid] = v;                                                             \
        for (int width = LOCAL_SIZE / 2; width > 0; width /= 2) {                     \
            barrier(CLK_LOCAL_MEM_FENCE);                                             \
            if (lid < width) scratch[lid] = join(scratch[lid], scratch[lid + width]); \
        }                                                                             \
        barrier(CLK_LOCAL_MEM_FENCE);                                                 \
        return scratch[0];                                                            \
    }
#else
#define REDUCE(name, type, join) \
    inline type name(const type v, __local type* scratch, const int lid) { return v; }
#endif
#define SUM_OF(a, b) ((a) + (b))
REDUCE(reduce_max, float, fmax)
REDUCE(reduce_sum, float, SUM_OF)

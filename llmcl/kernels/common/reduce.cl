// reduce_NAME(v, scratch, lid) -> v of all work-items of a group joined in pairs, in each of them. Another one is
//
//     inline TYPE reduce_NAME(const TYPE v, __local TYPE* scratch, const int lid) REDUCED(JOIN)
//
// scratch  what LOCAL_SCRATCH declares at the head of a kernel; it may hold what is still read: a barrier comes before
//          the first write.
// Build: LOCAL_SIZE (a power of two). Local memory: LOCAL_SIZE values for each scratch, none with a LOCAL_SIZE of 1.
#if LOCAL_SIZE > 1
#define LOCAL_SCRATCH(type, name) __local type name[LOCAL_SIZE]
#define REDUCED(join)                                                                 \
    {                                                                                 \
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
#define LOCAL_SCRATCH(type, name) __local type* const name = 0
#define REDUCED(join) \
    { return v; }
#endif
#define SUM_OF(a, b) ((a) + (b))
inline float reduce_max(const float v, __local float* scratch, const int lid) REDUCED(fmax)
inline float reduce_sum(const float v, __local float* scratch, const int lid) REDUCED(SUM_OF)

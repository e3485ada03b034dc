// reduce_NAME(v, scratch, lid) joins v over all work-items of a group, pair by pair, and returns the result to each. To define another:
//
//     inline TYPE reduce_NAME(const TYPE v, __local TYPE* scratch, const int lid) REDUCED(TYPE, JOIN)
//
// Work-items in a sub-group (sub_groups.cl) join values in registers, and one work-item per sub-group stores the result. Without
// sub-groups all work-items join in local memory, half as many in each turn. The order of joins differs between the two, and sums
// differ in the last bits; JOIN(a, b) must equal JOIN(b, a).
//
// scratch  declared by LOCAL_SCRATCH at the head of a kernel. Earlier content may still be in use: a barrier comes before the
//          first write. LOCAL_SCRATCHES(type, name, n) declares n scratches, each for LOCAL_SIZE neighbouring work-items;
//          the i-th begins at name + i * LOCAL_SIZE, and lid counts within those LOCAL_SIZE work-items.
// Build: LOCAL_SIZE (a power of two). Local memory: LOCAL_SIZE values per scratch, none with LOCAL_SIZE 1.
#include "common/sub_groups.cl"

#if LOCAL_SIZE > 1
#define LOCAL_SCRATCHES(type, name, n) __local type name[(n) * LOCAL_SIZE]
#if SUB_GROUP
#define REDUCED(type, join)                                                                                 \
    {                                                                                                       \
        type all = v;                                                                                       \
        for (int mask = min(LOCAL_SIZE, SUB_GROUP_SIZE) / 2; mask > 0; mask /= 2)                           \
            all = join(all, lanes_xor_##type(all, mask));                                                   \
        if (LOCAL_SIZE <= SUB_GROUP_SIZE) return all;                                                       \
        barrier(CLK_LOCAL_MEM_FENCE);                                                                       \
        if (LANE(lid) == 0) scratch[SUB_GROUP_ID(lid)] = all;                                               \
        barrier(CLK_LOCAL_MEM_FENCE);                                                                       \
        all = scratch[0];                                                                                   \
        for (int i = 1; i < LOCAL_SIZE / SUB_GROUP_SIZE; ++i) all = join(all, scratch[i]);                  \
        return all;                                                                                         \
    }
#else
#define REDUCED(type, join)                                                           \
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
#endif
#else
#define LOCAL_SCRATCHES(type, name, n) __local type* const name = 0
#define REDUCED(type, join) \
    { return v; }
#endif
#define LOCAL_SCRATCH(type, name) LOCAL_SCRATCHES(type, name, 1)
#define SUM_OF(a, b) ((a) + (b))
inline float reduce_max(const float v, __local float* scratch, const int lid) REDUCED(float, fmax)
inline float reduce_sum(const float v, __local float* scratch, const int lid) REDUCED(float, SUM_OF)

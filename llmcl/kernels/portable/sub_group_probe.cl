// Tests whether sub-groups behave as common/sub_groups.cl expects.
//
//   out[bit][i] = in[i xor 2^bit], from sub-group registers if 2^bit is below the sub-group size, else from memory
//   out[BITS][i] = the sum of `in`                                           in  uint [LOCAL_SIZE], out  uint [BITS + 1][LOCAL_SIZE]
//
// Index space: one group, local size LOCAL_SIZE. Build: SUB_GROUP, LOCAL_SIZE = 2^BITS; INTEL_LANES to require a size.
#if !defined(SUB_GROUP) || !defined(LOCAL_SIZE) || !defined(BITS)
#error "sub_group_probe.cl needs the build constants SUB_GROUP, LOCAL_SIZE, BITS"
#endif
#include "common/reduce.cl"

inline uint reduce_sum_uint(const uint v, __local uint* scratch, const int lid) REDUCED(uint, SUM_OF)

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1))) REQUIRE_LANES
void sub_group_probe(__global const uint* in, __global uint* out) {
    LOCAL_SCRATCH(uint, scratch);
    const int lid = get_local_id(0);
    const uint v = in[lid];
    for (int bit = 0; bit < BITS; ++bit) {
        uint other = in[lid ^ 1 << bit];
        if (1 << bit < SUB_GROUP_SIZE) other = lanes_xor_uint(v, 1u << bit);
        out[bit * LOCAL_SIZE + lid] = other;
    }
    out[BITS * LOCAL_SIZE + lid] = reduce_sum_uint(v, scratch, lid);
}

// Common names for sub-groups on all drivers: neighbouring work-items that run in step and can read each other's registers.
//
//   SUB_GROUP           the driver's dialect (runtime/sub_groups.py); 0 or undefined: no sub-groups, nothing below exists
//     SUB_GROUP_INTEL   cl_intel_subgroups; a kernel may require a size (cl_intel_required_subgroup_size)
//     SUB_GROUP_AMD     clang's built-ins: AMD's compiler has no other names in OpenCL C 1.2
//     SUB_GROUP_QCOM    cl_khr_subgroups and cl_qcom_subgroup_shuffle; a kernel may require half a wave
//     SUB_GROUP_KHR     cl_khr_subgroups and cl_khr_subgroup_shuffle
//   SUB_GROUP_SIZE      work-items per sub-group, a power of two
//   LANES               the same as a constant, if known: on AMD, and in a kernel that requires a size
//   REQUIRE_LANES       attribute for a kernel that needs LANES; the kernel's file defines INTEL_LANES before
//   LANE, SUB_GROUP_ID  for work-item `lid` in a group with one dimension
//   lanes_xor_TYPE(v, mask)   v of the work-item in lane LANE ^ mask, mask below SUB_GROUP_SIZE
//
// Every work-item in a sub-group must call lanes_xor. Work-item i is lane i % SUB_GROUP_SIZE of sub-group i / SUB_GROUP_SIZE.
// OpenCL does not promise this order: a device with another order fails the probe (portable/sub_group_probe.cl).
#define SUB_GROUP_INTEL 1
#define SUB_GROUP_AMD 2
#define SUB_GROUP_QCOM 3
#define SUB_GROUP_KHR 4

#define REQUIRE_LANES
#if SUB_GROUP == SUB_GROUP_INTEL
#ifdef INTEL_LANES
#define LANES INTEL_LANES
#undef REQUIRE_LANES
#define REQUIRE_LANES __attribute__((intel_reqd_sub_group_size(INTEL_LANES)))
#endif
#define LANES_XOR(v, mask) intel_sub_group_shuffle_xor(v, mask)
#elif SUB_GROUP == SUB_GROUP_AMD
#define LANES __AMDGCN_WAVEFRONT_SIZE
#define AMD_LANE __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u))
#define LANES_XOR(v, mask) as_uint(__builtin_amdgcn_ds_bpermute((AMD_LANE ^ (mask)) << 2, as_int(v)))
#elif SUB_GROUP == SUB_GROUP_QCOM
#pragma OPENCL EXTENSION cl_khr_subgroups : enable
#pragma OPENCL EXTENSION cl_qcom_reqd_sub_group_size : enable
#pragma OPENCL EXTENSION cl_qcom_subgroup_shuffle : enable
#ifdef INTEL_LANES
#define LANES 64
#undef REQUIRE_LANES
#define REQUIRE_LANES __attribute__((qcom_reqd_sub_group_size("half")))
#endif
#define LANES_XOR(v, mask) qcom_sub_group_shuffle_xor(v, mask, CLK_SUB_GROUP_SHUFFLE_WIDTH_WAVE_SIZE_QCOM, v)
#elif SUB_GROUP == SUB_GROUP_KHR
#pragma OPENCL EXTENSION cl_khr_subgroups : enable
#pragma OPENCL EXTENSION cl_khr_subgroup_shuffle : enable
#define LANES_XOR(v, mask) sub_group_shuffle_xor(v, mask)
#endif

#if SUB_GROUP
#ifdef LANES
#define SUB_GROUP_SIZE LANES
#else
#define SUB_GROUP_SIZE ((int)get_max_sub_group_size())
#endif
#define LANE(lid) ((lid) % SUB_GROUP_SIZE)
#define SUB_GROUP_ID(lid) ((lid) / SUB_GROUP_SIZE)
inline uint lanes_xor_uint(const uint v, const uint mask) { return LANES_XOR(v, mask); }
inline int lanes_xor_int(const int v, const uint mask) { return as_int(lanes_xor_uint(as_uint(v), mask)); }
inline float lanes_xor_float(const float v, const uint mask) { return as_float(lanes_xor_uint(as_uint(v), mask)); }
inline float2 lanes_xor_float2(const float2 v, const uint mask) {
    return (float2)(lanes_xor_float(v.x, mask), lanes_xor_float(v.y, mask));
}
inline ulong lanes_xor_ulong(const ulong v, const uint mask) {
    const uint2 words = as_uint2(v);
    return as_ulong((uint2)(lanes_xor_uint(words.x, mask), lanes_xor_uint(words.y, mask)));
}
#endif

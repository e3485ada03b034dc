// Weights drawn on the device, for measuring speed without a checkpoint: uniform in [-SPREAD, SPREAD), a pure function
// of seed and index.
//
// tiles  WEIGHT [n]      Index space: any; each work-item takes every global-size-th value. Build: WEIGHT, SPREAD.
#if !defined(WEIGHT) || !defined(SPREAD)
#error "random_weight.cl needs the build constants WEIGHT, SPREAD"
#endif
#include "common.cl"

__kernel void random_weight(__global CAT(WEIGHT, _t)* tiles, const ulong n, const uint seed) {
    for (ulong i = get_global_id(0); i < n; i += get_global_size(0)) {
        uint x = (uint)i * 0x9e3779b9u + (uint)(i >> 32) * 0x85ebca6bu + seed;
        x = (x ^ (x >> 16)) * 0x21f0aaadu;
        x = (x ^ (x >> 15)) * 0xd35a2d97u;
        x ^= x >> 15;
        CAT(store1_, WEIGHT)(((float)(x >> 8) * 0x1p-23f - 1.0f) * SPREAD, tiles + i);
    }
}

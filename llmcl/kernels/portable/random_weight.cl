// Draws random weights on the device, to measure speed without a checkpoint: variance spread^2 / 3, a pure function of seed
// and index.
//
// Floating-point tiles are uniform in [-spread, spread). Quantised tiles (tiles.cl) are random bits except for the scales:
// with S = 2 spread / 2^bits and u uniform in [0, 1), taken from the bits in the scale's place,
//
//   d = S (0.75 + u / 2)        m = -d (2^bits - 1) / 2        k formats: sc in 32 .. 63, mn = sc, dmin = d (2^bits - 1) / 2
//
// where d is divided by the mean of sc; types with a char sc have it in -95 .. -32 and 32 .. 95 (one for 16 or for 32 columns). Without
// m, d has a random sign, because the numbers have a mean of -1/2. mxfp4 and nvfp4 pick one of two neighbouring powers of two as a
// scale, with probabilities that give the variance. Numbers from a table, and tq's, have another variance: LEVELS makes up for it. All
// values are finite.
//
// tiles  floating-point: WEIGHT [n]; quantised: n groups of 16 rows x 32 columns, whole tiles of k columns
// Index space: any; each work-item takes every global-size-th value or group. Build: WEIGHT; sizes are arguments: all matrices of
// a type share a program.
#if !defined(WEIGHT)
#error "random_weight.cl needs the build constant WEIGHT"
#endif
#define K k  // the kernel's argument, for TILE_SIZE
#include "common/tiles.cl"

inline uint random_bits(const ulong i, const uint seed) {
    uint x = (uint)i * 0x9e3779b9u + (uint)(i >> 32) * 0x85ebca6bu + seed;
    x = (x ^ (x >> 16)) * 0x21f0aaadu;
    x = (x ^ (x >> 15)) * 0xd35a2d97u;
    return x ^ (x >> 15);
}

#if !QUANTIZED
__kernel void random_weight(__global CAT(WEIGHT, _t)* tiles, const ulong n, const int k, const float spread,
                            const uint seed) {
    for (ulong i = get_global_id(0); i < n; i += get_global_size(0))
        CAT(store1_, WEIGHT)(((float)(random_bits(i, seed) >> 8) * 0x1p-23f - 1.0f) * spread, tiles + i);
}
#else
#if HAS_TABLE
// The root of 12 times the mean square over the table.
inline float levels() {
    float squares = 0.0f;
    for (int code = 0; code < 16; ++code) squares += (float)((table_number(code) - 128) * (table_number(code) - 128));
    return SCALE_UNIT * sqrt(squares * 0.75f);
}
#define LEVELS levels()
#else
#define LEVELS                                                             \
    (WEIGHT_IS(q8_0) ? 256.0f : WEIGHT_IS(q6_k) ? 64.0f : HAS_FIFTH_BIT ? 32.0f : WEIGHT_IS(q3_k) ? 8.0f : WEIGHT_IS(q2_k) ? 4.0f \
     : HAS_PAIRS ? 4.24264f : 16.0f)
#endif
#define HAS_CHAR_SCALES (IS_SUPER && !HAS_MIN && !HAS_HALF_MIN)
#define MEAN_SCALE (HAS_CHAR_SCALES ? 63.5f : HAS_HALF_MIN ? 11.5f : IS_SUPER ? 47.5f : 1.0f)

#if HAS_FP4
// The mean square over a code's values is 8.5625; doubling the scale quadruples the square. nvfp4's are of twice the value, in steps of 8.
inline void make_scales(__global uchar* at, const float spread) {
    const float wanted = spread * 0.19730546f, lower = floor(log2(wanted)), ratio = wanted / exp2(lower);
    for (int r = 0; r < SCALE_BYTES; ++r) {
        const int power = (int)lower + (at[r] < 256.0f * (ratio * ratio - 1.0f) / 3.0f ? 1 : 0);
        at[r] = WEIGHT_IS(nvfp4) ? 8 * (7 + power) : 127 + power;
    }
}
#else
// Makes 16 scales from random bits in place, then their minima.
inline void make_scales(__global uchar* at, const float spread) {
    for (int r = 0; r < 16; ++r) {
        const ushort bits = ((__global const ushort*)at)[r];
        const float size = spread * (2.0f / LEVELS / MEAN_SCALE) * (0.75f + (float)bits * 0x1p-17f);
        vstore_half_rte(HAS_MIN || HAS_HALF_MIN || bits % 2 ? size : -size, r, (__global half*)at);
#if HAS_MIN || HAS_HALF_MIN
        vstore_half_rte((IS_SUPER ? 0.5f : -0.5f) * (LEVELS - 1.0f) * half_of(at + 2 * r), r, (__global half*)(at + 32));
#endif
    }
}
#endif

__kernel void random_weight(__global uchar* tiles, const ulong n, const int k, const float spread,
                            const uint seed) {
    for (ulong i = get_global_id(0); i < n; i += get_global_size(0)) {
        const ulong g = i % (k / 32), first = i / (k / 32) * TILE_SIZE + GROUP_AT(g);
        for (int b = 0; b < GROUP_BYTES; b += 4)
            *(__global uint*)(tiles + first + b) = random_bits((first + b) / 4, seed);
#if IS_SUPER
        if (g % 8 == 0) {
            for (int b = 0; b < HEAD_BYTES; b += 4)
                *(__global uint*)(tiles + first - HEAD_BYTES + b) = random_bits((first - HEAD_BYTES + b) / 4, seed);
            make_scales(tiles + first - HEAD_BYTES, spread);
        }
        for (int r = 0; r < 16; ++r) {
            __global uchar* sc = tiles + first + r;
#if HAS_MIN
            sc[0] = sc[16] = 32 + sc[0] % 32;
#elif HAS_HALF_MIN
            for (int half_index = 0; half_index < 32; half_index += 16) sc[half_index] = (8 + sc[half_index] % 8) * 17;
#else
            for (int half_index = 0; half_index < SCALE_BYTES; half_index += 16)
                sc[half_index] = sc[half_index] < 128 ? 32 + sc[half_index] % 64 : 224 - sc[half_index] % 64;
#endif
        }
#else
        make_scales(tiles + first, spread);
#endif
    }
}
#endif

// Rounds a group of 32 activations to 8 bits, as described in cpu/quant_tile.cl. After common/common.cl.
inline int sum16i(int16 v) {
    const int8 a = v.lo + v.hi;
    const int4 b = a.lo + a.hi;
    return b.x + b.y + b.z + b.w;
}

// Rounds a group's 32 activations lo, hi to q; returns the record. offset, in_halves: RECORD_OFFSET_OF and HAS_HALF_SCALES_OF a weight.
inline float4 quantize_group_for(const float16 lo, const float16 hi, char16* q, const int offset, const bool in_halves) {
    // The maximum over the bits, which order like magnitudes.
    const uint16 low = as_uint16(lo) & 0x7fffffffu, high = as_uint16(hi) & 0x7fffffffu, either = MAX(low, high);
    const uint8 top8 = MAX(either.lo, either.hi);
    const uint4 top4 = MAX(top8.lo, top8.hi);
    const uint2 top2 = MAX(top4.lo, top4.hi);
    const float largest = as_float(MAX(top2.x, top2.y));
    const float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    // Adding 1.5 x 2^23 rounds to the nearest integer, which ends up in the lower bits.
    const int16 a = as_int16(lo * inverse + 0x1.8p23f) - 0x4b400000, b = as_int16(hi * inverse + 0x1.8p23f) - 0x4b400000;
    q[0] = CONVERT16(a, char);
    q[1] = CONVERT16(b, char);
    const int first = sum16i(in_halves ? a : a + b), last = in_halves ? sum16i(b) : 0;  // otherwise only the total is used
    return (float4)(scale, as_float(-offset * first), as_float(-offset * last), scale * (float)(first + last));
}

// MXFP4 numbers (OCP Microscaling Formats, 2023): a 4-bit code has a sign, 2 exponent bits and 1 mantissa bit; a scale is a power
// of two.
//
//   code & 7        0  1    2  3    4  5  6  7
//   |value|         0  0.5  1  1.5  2  3  4  6     times 2^(scale - 127)
//
// Kernels use twice the value plus 12, a number from 0 to 24 that fits a byte, and half the scale.

// Converts each byte's lower half; the upper half may hold anything. For codes 4, 5, 6, 7 the number is 0, 1, 2, 5 more than the code.
inline uint mxfp4_numbers(const uint codes) {
    const uint low = codes & 0x07070707u, large = low >> 2 & 0x01010101u, minus = codes >> 3 & 0x01010101u;
    const uint more = low & (large | large << 1), both = more & more >> 1;
    const uint twice = low + more + (both << 1);
    return 0x0c0c0c0cu + twice - ((twice & ((minus << 8) - minus)) << 1);
}
inline uint16 mxfp4_numbers16(const uint16 codes) {
    const uint16 low = codes & 0x07070707u, large = low >> 2 & 0x01010101u, minus = codes >> 3 & 0x01010101u;
    const uint16 more = low & (large | large << 1), both = more & more >> 1;
    const uint16 twice = low + more + (both << 1);
    return 0x0c0c0c0cu + twice - ((twice & ((minus << 8) - minus)) << 1);
}

// Returns 2^(scale - 128). A subnormal result counts as 0.
inline float mxfp4_scale(const uchar scale) { return as_float(((int)MAX(scale, 1) - 1) << 23); }

// Returns half an NVFP4 scale: 4 exponent bits with bias 7 and 3 mantissa bits. The sign bit is ignored, and 127 counts as 0, as in ggml.
inline float nvfp4_scale(const uchar scale) {
    const uint bits = scale & 127u;
    const float d = as_float((bits << 20) + (119u << 23));
    return scale == 127 ? 0.0f : bits < 8 ? (d - 0x1p-8f) * 2.0f : d;
}
inline float4 nvfp4_scales(const uint scales) {
    const uchar4 s = as_uchar4(scales);
    return (float4)(nvfp4_scale(s.x), nvfp4_scale(s.y), nvfp4_scale(s.z), nvfp4_scale(s.w));
}

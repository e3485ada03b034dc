// Numbers of MXFP4 blocks (OCP Microscaling Formats, 2023): a code of 4 bits is a sign, 2 bits of exponent and 1 of mantissa,
// a scale a power of two.
//
//   code & 7        0  1    2  3    4  5  6  7
//   |value|         0  0.5  1  1.5  2  3  4  6     times 2^(scale - 127)
//
// Kernels take twice the value and 12 as a number of 0 to 24, which a byte holds, and half of the scale.

// Of the lower half of each byte; the upper half may hold anything. Of 4, 5, 6 and 7 the number is 0, 1, 2 and 5 more than the code.
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

// 2^(scale - 128); less than a float32 that is not subnormal counts as 0, and 255 is no number.
inline float mxfp4_scale(const uchar scale) { return scale == 255 ? NAN : as_float(((int)MAX(scale, 1) - 1) << 23); }

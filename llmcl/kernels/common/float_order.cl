// Unsigned numbers in the order of the floats: NaN of the negative sign, -infinity, ..., infinity, NaN.
inline uint order_of(const float v) {
    const uint bits = as_uint(v);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The float of such a number.
inline float ordered_float(const uint order) { return as_float(order >> 31 ? order & 0x7fffffffu : ~order); }

// Maps floats to unsigned numbers with the same order: NaN with negative sign, -infinity, ..., infinity, NaN.
inline uint order_of(const float v) {
    const uint bits = as_uint(v);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Maps an unsigned number back to its float.
inline float ordered_float(const uint order) { return as_float(order >> 31 ? order & 0x7fffffffu : ~order); }

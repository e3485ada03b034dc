// Streaming read of a buffer: measures the memory ceiling for decode.
//
//   result[g] = xor of all 64-byte pieces read by work-item g
//
// source  uint16 [n]      result  uint [global size]      n: 64-byte pieces
// LOCAL_SIZE 1: each work-item streams its own contiguous share (CPU);
// otherwise neighbouring work-items read neighbouring 16 bytes (GPU).
#if !defined(LOCAL_SIZE)
#error "read_bandwidth.cl needs the build constants LOCAL_SIZE"
#endif

__kernel void read_bandwidth(__global const uint4* source, __global uint* result, const ulong n) {
    const ulong id = get_global_id(0), width = get_global_size(0);
    uint4 a = 0, b = 0, c = 0, d = 0;
#if LOCAL_SIZE == 1
    const ulong end = n * (id + 1) / width;
    __global const uint16* wide = (__global const uint16*)source;
    uint16 wa = 0, wb = 0;
    ulong i = n * id / width;
    for (; i + 4 <= end; i += 4) {
        wa ^= wide[i] ^ wide[i + 1];
        wb ^= wide[i + 2] ^ wide[i + 3];
    }
    for (; i < end; ++i) wa ^= wide[i];
    wa ^= wb;
    a = wa.lo.lo; b = wa.lo.hi; c = wa.hi.lo; d = wa.hi.hi;
#else
    const ulong pieces = n * 4;
    ulong i = id;
    for (; i + 3 * width < pieces; i += 4 * width) {
        a ^= source[i]; b ^= source[i + width]; c ^= source[i + 2 * width]; d ^= source[i + 3 * width];
    }
    for (; i < pieces; i += width) a ^= source[i];
#endif
    a ^= b ^ c ^ d;
    result[id] = a.x ^ a.y ^ a.z ^ a.w;
}

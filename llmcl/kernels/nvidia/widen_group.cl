// Widens a group of a quantised tile in local memory to 16 rows x 32 columns of 16 bits for the matrix units (SWIZZLE_32 in wgmma.cl).
//
// mxfp4 becomes bfloat16, which represents all mxfp4 values. Other types become float16 as in nvidia/few_rows_quantized.cl: q d or
// q d + m, with d and m rounded to float16 if they are products in the format.
//
// A piece is a group in tiles.cl, followed by the super-block's head in the k formats. It is copied in 16-byte slots.
//
// A lane has 4 + 4 columns in two neighbouring rows: the columns in a vector of nibbles.
#define GROUP_SLOTS (GROUP_BYTES / 16)
#define PIECE_BYTES (GROUP_BYTES + (IS_SUPER ? HEAD_BYTES : 0))
#define PIECE_SLOTS (PIECE_BYTES / 16)
// The address of a slot of a tile's first piece, and the distance in bytes from piece to piece.
#define PIECE_SLOT_AT(slot) (IS_SUPER ? (slot) < GROUP_SLOTS ? HEAD_BYTES + (slot) * 16 : ((slot) - GROUP_SLOTS) * 16 : (slot) * 16)
#define PIECE_SLOT_STEP(slot, p)                                                                                       \
    (!IS_SUPER               ? GROUP_BYTES                                                                             \
     : (slot) < GROUP_SLOTS ? GROUP_BYTES + ((p) % 8 == 7 ? HEAD_BYTES : 0)                                            \
                             : ((p) % 8 == 7 ? SUPER_BYTES : 0))

// A lane begins with a different column in each vector, so that the lanes' writes use different banks: byte i of a turned word is
// column (i + vector) % 4 of the word's four.
inline uint turn(const uint word, const int vector) { return rotate(word, (uint)(32 - 8 * vector) % 32); }

#if WEIGHT_IS(mxfp4)
// bfloat16 numbers from two rows' codes, in the upper halves of t's bytes 1 and 3: the bits in place represent 2^-126 of the value.
inline uint widen_codes(const uint t, const uint scales) {
    const uint bits = (t & 0x80008000u) | (t >> 6 & 0x01c001c0u);
    return mul_bf16x2(mul_bf16x2(bits, 0x7e807e80u), scales);
}
#else
// Two rows' d, or m, in a word. at: halves for 16 rows.
inline uint row_halves(const __local uchar* at, const int rows) { return ((const __local uint*)at)[rows]; }

#if IS_SUPER
// The same times the rows' bytes at `factors`, and with a sign.
inline uint row_products(const __local uchar* at, const __local uchar* factors, const int rows, const float sign) {
    const float2 d = widen_f16(row_halves(at, rows));
#if WEIGHT_IS(q6_k)
    const char2 by = ((const __local char2*)factors)[rows];
#else
    const uchar2 by = ((const __local uchar2*)factors)[rows];
#endif
    return narrow_weights_f16(sign * d.x * (float)by.x, sign * d.y * (float)by.y);
}
#endif

// Values of byte i in two rows' words. A byte in the mantissa of a half gives 1024 + byte.
inline uint widen_bytes(const uint first, const uint second, const int i, const uint scales, const uint least) {
    const uint bits = (permute(first, second, 0x0400 + i * 0x0101) & 0x00ff00ffu) | 0x64006400u;
    const uint numbers = sub_f16x2(bits, (0x6400 + OFFSET) * 0x10001u);
    return HAS_MIN ? fma_f16x2(numbers, scales, least) : mul_f16x2(numbers, scales);
}
#endif

inline void widen_group(const __local uchar* piece, const uint to, const int lane) {
    const int vector = lane / 8, rows = lane % 8;
    const __local uint2* words = (const __local uint2*)(piece + SCALE_BYTES);  // 8 per vector
    const uint at = to + vector * 128 + (rows * 4 ^ vector % 2 * 16);
#if WEIGHT_IS(mxfp4)
    const uint2 codes = words[lane];
    const uint exponents = ((const __local ushort*)piece)[rows], a = exponents & 255, b = exponents >> 8;
    const uint scales = (a << 7 | (a == 0 || a == 255 ? 0x40 : 0)) | (b << 7 | (b == 0 || b == 255 ? 0x40 : 0)) << 16;
    const uint first = turn(codes.x, vector), second = turn(codes.y, vector);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint t = permute(first, second, 0x4000 + i * 0x1010), column = (i + vector) % 4;
        store4_local(at + column * 32, widen_codes(t << 4, scales));
        store4_local(at + column * 32 + 512, widen_codes(t, scales));
    }
#else
    uint2 q[2] = {words[lane], (uint2)(0)};
#if WEIGHT_IS(q8_0)
    q[1] = words[32 + lane];
#else
    q[1] = q[0] >> 4 & 0x0f0f0f0fu;
    q[0] &= 0x0f0f0f0fu;
#if HAS_FIFTH_BIT
    const uint2 high = words[32 + rows] >> (uint)vector;
    q[0] |= (high & 0x01010101u) << 4;
    q[1] |= high & 0x10101010u;
#elif WEIGHT_IS(q6_k)
    q[0] |= (words[32 + rows] >> (uint)(2 * vector) & 0x03030303u) << 4;
    q[1] |= (words[40 + rows] >> (uint)(2 * vector) & 0x03030303u) << 4;
#endif
#endif
#if IS_SUPER
    const __local uchar* head = piece + GROUP_BYTES;
    uint scales[2] = {row_products(head, piece, rows, 1.0f), 0};
    scales[1] = WEIGHT_IS(q6_k) ? row_products(head, piece + 16, rows, 1.0f) : scales[0];
    const uint least = HAS_MIN ? row_products(head + 32, piece + 16, rows, -1.0f) : 0;
#else
    const uint scales[2] = {row_halves(piece, rows), row_halves(piece, rows)};
    const uint least = HAS_MIN ? row_halves(piece + 32, rows) : 0;
#endif
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint first = turn(q[h].x, vector), second = turn(q[h].y, vector);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            store4_local(at + (i + vector) % 4 * 32 + 512 * h, widen_bytes(first, second, i, scales[h], least));
    }
#endif
}

// Like nvidia/few_rows_16_bit.cl, for quantised weights: numbers are converted to float16 in registers, q d or q d + m, with d and
// m rounded to float16 if they are products in the format. mxfp4's scales are beyond float16: its codes are converted in units of 1
// / CODE_UNIT, and the sums of a piece are multiplied by the rows' scales.
//
// A piece is a group in tiles.cl, followed by the super-block's head in the k formats. A lane has columns 4 t .. 4 t + 3 and 16
// further on: a word of nibbles for each row.
#define OPERAND f16
#define GROUP_SLOTS (GROUP_BYTES / 16)
#if IS_SUPER
#define PIECE_SLOTS (GROUP_SLOTS + HEAD_BYTES / 16)
#define SLOT_AT(p, slot) \
    ((slot) < GROUP_SLOTS ? (slot) * 16 : ((slot) - GROUP_SLOTS) * 16 - HEAD_BYTES - (p) % 8 * GROUP_BYTES)
#else
#define PIECE_SLOTS GROUP_SLOTS
#define SLOT_AT(p, slot) ((slot) * 16)
#endif
#define TILE_BYTES ((int)TILE_SIZE)
#define PIECE_AT(p) GROUP_AT(p)
// Slots after the scales are permuted with the activations, as in nvidia/few_rows_16_bit.cl.
#define SCALE_SLOTS (SCALE_BYTES / 16)
#define VECTOR_PLACE(slot) ((slot) ^ ((slot) >> 3 & 1) << 1)
#define PIECE_PLACE(slot) \
    ((slot) < SCALE_SLOTS || (slot) >= GROUP_SLOTS ? (slot) : SCALE_SLOTS + VECTOR_PLACE((slot) - SCALE_SLOTS))
#define X_PLACE(row) ((row) ^ ((row) >> 3 & 1) << 2)
#define ROW_COUNT (2 * TILES)

// Reads a word per row of the lane, from vector v. piece: of the rows' tile, row: the first row there.
inline void row_words(uint words[ROW_COUNT], const __local uchar* piece, const int v, const int row) {
    const __local uchar* vectors = piece + SCALE_BYTES;
#if TILES == 1
    const uint2 w = *(const __local uint2*)(vectors + VECTOR_PLACE(4 * v + row / 4) * 16 + row % 4 * 4);
    words[0] = w.x, words[1] = w.y;
#else
#pragma unroll
    for (int i = 0; i < ROW_COUNT; i += 4) {
        const uint4 w = *(const __local uint4*)(vectors + VECTOR_PLACE(4 * v + row / 4 + i / 4) * 16);
        words[i] = w.x, words[i + 1] = w.y, words[i + 2] = w.z, words[i + 3] = w.w;
    }
#endif
}

#if WEIGHT_IS(mxfp4)
#define CODE_UNIT 16384.0f

// Factors 2^(e - 127) for the lane's rows 2 m and 2 m + 1, in the order of the numbers in a result.
inline void row_factors(float4 factors[TILES], const __local uchar* pieces, const int lane) {
    const int first = lane / 4 * ROW_COUNT;
    const __local ushort* scales = (const __local ushort*)(pieces + first / 16 * (PIECE_SLOTS * 16) + first % 16);
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
        const uint two = scales[m];
        const float a = as_float((two & 255) << 23), b = as_float(two >> 8 << 23);
        factors[m] = (float4)(a, a, b, b);
    }
}

// a[h][m] as below. A code has a sign, two exponent bits and one mantissa bit: in their places in a half's upper byte they
// represent 1 / CODE_UNIT of the value.
inline void fragments(uint4 a[2][TILES], const __local uchar* pieces, const int lane) {
    const int first = lane / 4 * ROW_COUNT, t = lane % 4, row = first % 16;
    uint codes[ROW_COUNT];
    row_words(codes, pieces + first / 16 * (PIECE_SLOTS * 16), t, row);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        uint v[2][ROW_COUNT];
#pragma unroll
        for (int i = 0; i < ROW_COUNT; ++i) {
            const uint code = h ? codes[i] : codes[i] << 4;
            const uint upper = (code & 0x80808080u) | (code >> 3 & 0x0e0e0e0eu);
            v[0][i] = permute(upper, 0, 0x1404);
            v[1][i] = permute(upper, 0, 0x3424);
        }
#pragma unroll
        for (int m = 0; m < TILES; ++m) a[h][m] = (uint4)(v[0][2 * m], v[0][2 * m + 1], v[1][2 * m], v[1][2 * m + 1]);
    }
}
#else
// The lane's halves at p, each in both halves of a word.
inline void row_halves(uint halves[ROW_COUNT], const __local uchar* p, const int row) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        const uint w = *(const __local uint*)(p + 2 * row + 4 * i);
        halves[2 * i] = permute(w, w, 0x1010);
        halves[2 * i + 1] = permute(w, w, 0x3232);
    }
}

// The halves times the lane's bytes at `factors`.
inline void row_products(uint products[ROW_COUNT], const __local uchar* p, const __local uchar* factors, const int row,
                         const bool is_signed) {
#pragma unroll
    for (int i = 0; i < ROW_COUNT; i += 2) {
        const float2 d = widen_f16(*(const __local uint*)(p + 2 * (row + i)));
        const float a = is_signed ? (float)(char)factors[row + i] : (float)factors[row + i];
        const float b = is_signed ? (float)(char)factors[row + i + 1] : (float)factors[row + i + 1];
        products[i] = narrow_weights_f16(d.x * a, d.x * a);
        products[i + 1] = narrow_weights_f16(d.y * b, d.y * b);
    }
}

// Two bytes of a word, the first at a multiple of 2, as numbers: a byte in the mantissa of a half gives 1024 + byte.
#define NUMBERS(word, pair) sub_f16x2(permute(word, 0x64646464, (pair) ? 0x4342 : 0x4140), (0x6400 + OFFSET) * 0x10001u)

// a[h][m]: the lane's rows 2 m and 2 m + 1, columns 16 h + 4 t .. 16 h + 4 t + 3. pieces: the pieces of the warp's tiles.
inline void fragments(uint4 a[2][TILES], const __local uchar* pieces, const int lane) {
    const int first = lane / 4 * ROW_COUNT, t = lane % 4, row = first % 16;
    const __local uchar* piece = pieces + first / 16 * (PIECE_SLOTS * 16);
    uint q[2][ROW_COUNT], d[2][ROW_COUNT];
    row_words(q[0], piece, t, row);
#if WEIGHT_IS(q8_0)
    row_words(q[1], piece, 4 + t, row);
#else
#pragma unroll
    for (int i = 0; i < ROW_COUNT; ++i) {
        q[1][i] = q[0][i] >> 4 & 0x0f0f0f0fu;
        q[0][i] &= 0x0f0f0f0fu;
    }
#if HAS_FIFTH_BIT
    uint high[ROW_COUNT];
    row_words(high, piece, 4, row);
#pragma unroll
    for (int i = 0; i < ROW_COUNT; ++i) {
        q[0][i] |= (high[i] >> t & 0x01010101u) << 4;
        q[1][i] |= (high[i] >> t >> 4 & 0x01010101u) << 4;
    }
#elif WEIGHT_IS(q6_k)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        uint high[ROW_COUNT];
        row_words(high, piece, 4 + h, row);
#pragma unroll
        for (int i = 0; i < ROW_COUNT; ++i) q[h][i] |= (high[i] >> (2 * t) & 0x03030303u) << 4;
    }
#endif
#endif
#if IS_SUPER
    const __local uchar* head = piece + GROUP_BYTES;
    row_products(d[0], head, piece, row, WEIGHT_IS(q6_k));
#if WEIGHT_IS(q6_k)
    row_products(d[1], head, piece + 16, row, true);
#endif
#else
    row_halves(d[0], piece, row);
#endif
#if HAS_MIN
    uint least[ROW_COUNT];
#if IS_SUPER
    row_products(least, head + 32, piece + 16, row, false);
#pragma unroll
    for (int i = 0; i < ROW_COUNT; ++i) least[i] ^= 0x80008000u;
#else
    row_halves(least, piece + 32, row);
#endif
#endif
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        uint v[2][ROW_COUNT];
#pragma unroll
        for (int i = 0; i < ROW_COUNT; ++i) {
            const uint scale = d[WEIGHT_IS(q6_k) ? h : 0][i];
#pragma unroll
            for (int pair = 0; pair < 2; ++pair)
#if HAS_MIN
                v[pair][i] = fma_f16x2(NUMBERS(q[h][i], pair), scale, least[i]);
#else
                v[pair][i] = mul_f16x2(NUMBERS(q[h][i], pair), scale);
#endif
        }
#pragma unroll
        for (int m = 0; m < TILES; ++m) a[h][m] = (uint4)(v[0][2 * m], v[0][2 * m + 1], v[1][2 * m], v[1][2 * m + 1]);
    }
}

#endif

// The matching activations: the same columns of token lane / 4, two words for each h.
inline uint4 activations(const __local uint4* block, const int lane) {
    const int g = lane / 4, t = lane % 4, first = t / 2 * 8 + g;
    const uint2 low = ((const __local uint2*)(block + X_PLACE(first)))[t % 2];
    const uint2 high = ((const __local uint2*)(block + X_PLACE(first + 16)))[t % 2];
    return (uint4)(low, high);
}

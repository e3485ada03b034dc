// A warp's pieces of a 16-bit weight, for nvidia/linear_few_rows.cl: layout in local memory, and conversion to operands. A lane has
// columns 8 t .. 8 t + 7.
//
// A piece, 32 columns of a tile, has 64 slots of 16 bytes: slot 2 c + h has rows 8 h .. 8 h + 7 of column c. Slots and activations
// are permuted so that the lanes in a quarter of a warp, with columns 8 apart, read from different banks.
#define OPERAND WEIGHT
#define PIECE_SLOTS 64
#define PIECE_PLACE(slot) ((slot) ^ ((slot) >> 4 << 1))
#define X_PLACE(row) ((row) ^ ((row) >> 3 << 1))  // in a block of activations: 32 pieces with a token and 8 columns each

// Bytes per tile, from the tile to a piece, and from the piece to a slot.
#define TILE_BYTES (K * 32)
#define PIECE_AT(p) ((p) * 1024)
#define SLOT_AT(p, slot) ((slot) * 16)

// The words of a column: a lane's 2 TILES rows.
typedef struct {
    uint w[TILES];
} column_words;

inline column_words column_at(const __local uchar* p) {
    column_words c;
#if TILES == 4
    const uint4 v = *(const __local uint4*)p;
    c.w[0] = v.x, c.w[1] = v.y, c.w[2] = v.z, c.w[3] = v.w;
#elif TILES == 2
    const uint2 v = *(const __local uint2*)p;
    c.w[0] = v.x, c.w[1] = v.y;
#else
    c.w[0] = *(const __local uint*)p;
#endif
    return c;
}

// a[h][m]: the lane's rows 2 m and 2 m + 1, columns 8 t + 4 h .. 8 t + 4 h + 3. pieces: the pieces of the warp's tiles.
inline void fragments(uint4 a[2][TILES], const __local uchar* pieces, const int lane) {
    const int row = lane / 4 * 2 * TILES, t = lane % 4;
    const __local uchar* from = pieces + row / 16 * 1024 + t * 256 + row / 8 % 2 * 16 + row % 8 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        column_words c[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] = column_at(from + h * 128 + (i ^ t) * 32);
#pragma unroll
        for (int m = 0; m < TILES; ++m)
            a[h][m] = (uint4)(permute(c[0].w[m], c[1].w[m], 0x5410), permute(c[0].w[m], c[1].w[m], 0x7632),
                              permute(c[2].w[m], c[3].w[m], 0x5410), permute(c[2].w[m], c[3].w[m], 0x7632));
    }
}

// The matching activations: the same columns of token lane / 4, two words for each h.
inline uint4 activations(const __local uint4* block, const int lane) { return block[X_PLACE(lane % 4 * 8 + lane / 4)]; }

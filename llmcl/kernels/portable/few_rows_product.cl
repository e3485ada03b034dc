// The product of a 16-row tile, or of a gate and an up tile, with up to ROWS rows of x, shared by the work-items of a group: a piece
// of a tile is read and widened once for all rows. How the work-items share a tile: portable/tile_product.cl.
//
// With DOT (dot4.cl) x is rounded to 8 bits: see round_rows.cl.
//
// Build: WEIGHT, K, ROWS, LOCAL_SIZE. A kernel defines TILES_AT_ONCE, 1 or 2, before, and declares ROW_SUMS at its head.
#define INTEL_LANES 8
#define SUMS_IN_REGISTERS (SUB_GROUP == 1)  // Intel's; elsewhere they take registers of the other rows' sums
#define NORM 0
#define SHARED_NUMBERS 1
#include "portable/tile_pieces.cl"
#include "portable/sum_of_rows.cl"

#if DOT
typedef int row_t;
#define ROW_STRIDE ROW_WORDS
inline columns columns_of(__global const int* row, const int p, const uint power) {
    columns found;
    found.scale = as_float(row[K / 4 + p / PIECES_OF_GROUP]);
    TAKE_COLUMNS(found, row, p)
    return found;
}
#else
typedef float row_t;
#define ROW_STRIDE K
inline columns columns_of(__global const float* row, const int p, const uint power) {
    float square = 0.0f;
    return load_columns(row, row, p, &square, power);
}
#endif

// A work-item's share: own[t][r] = the sums of its pieces' rows of tile t times rows[r], r < n_rows; n_rows: a constant.
IN_REGISTERS inline void add_rows(float own[TILES_AT_ONCE][ROWS][PIECE_ROWS], __global const CAT(WEIGHT, _t)* tile,
                                  __global const row_t* const* rows, const int n_rows, const int lid, const uint power) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int t = 0; t < TILES_AT_ONCE; ++t)
#pragma unroll
            for (int i = 0; i < PIECE_ROWS; ++i) own[t][r][i] = 0.0f;
    piece now[TILES_AT_ONCE];
    for (int t = 0; t < TILES_AT_ONCE; ++t) now[t] = load_piece(tile + t * TILE_SIZE, min(lid, N_PIECES - 1));
    for (int p = lid; p < N_PIECES; p += LOCAL_SIZE) {
        piece next[TILES_AT_ONCE];
        for (int t = 0; t < TILES_AT_ONCE; ++t) next[t] = load_piece(tile + t * TILE_SIZE, min(p + LOCAL_SIZE, N_PIECES - 1));
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r >= n_rows) continue;
            columns c;  // assigned and not initialised: of the latter LLVM makes a call that Oclgrind does not know
            c = columns_of(rows[r], p, power);
#pragma unroll
            for (int t = 0; t < TILES_AT_ONCE; ++t) add_piece(own[t][r], &now[t], &c, p);
        }
        for (int t = 0; t < TILES_AT_ONCE; ++t) now[t] = next[t];
    }
}

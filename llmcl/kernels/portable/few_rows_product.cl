// Multiplies a 16-row tile, or a gate and an up tile, by up to ROWS rows of x, shared by a group's work-items. A tile piece is read and
// widened once for all rows. How the work-items share a tile: portable/tile_product.cl.
//
// With DOT (dot4.cl) x is rounded to 8 bits: see round_rows.cl.
//
// Build: WEIGHT, K, ROWS, LOCAL_SIZE. A kernel first defines TILES_AT_ONCE, 1 or 2, and declares ROW_SUMS at its head.
#define INTEL_LANES 8
#define SUMS_IN_REGISTERS (SUB_GROUP == 1)  // Intel only; elsewhere the row sums need the registers
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

// A work-item's share: own[t][r] = its pieces' rows in tile t times rows[r], r < n_rows; n_rows: a constant.
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
            columns c;  // assigned, not initialised: LLVM turns an initialiser into a call unknown to Oclgrind
            c = columns_of(rows[r], p, power);
#pragma unroll
            for (int t = 0; t < TILES_AT_ONCE; ++t) add_piece(own[t][r], &now[t], &c, p);
        }
        for (int t = 0; t < TILES_AT_ONCE; ++t) now[t] = next[t];
    }
}

// Multiplies one or two tiles by a token, shared by a group's work-items.
//
// A tile is cut into pieces with PIECE_ROWS rows and one or more columns (float_piece.cl, quant_piece.cl). Work-item i takes the
// pieces i, i + LOCAL_SIZE, ..., always in the same rows, and keeps the row sums in registers. The sums over the work-items are
// taken once, at the end (sum_of_rows.cl).
//
// After portable/tile_pieces.cl. The kernel first defines:
//   TILES_AT_ONCE  1, or 2 for a gate and an up tile     ALL_PIECES  the total number of pieces, N_PIECES per tile
//   operands, piece_at(operands, tile, p), columns_at(operands, p, square, power)   piece p in a tile, and its columns
// Build: LOCAL_SIZE (a power of two >= 16), AT_ONCE, AHEAD: see portable/linear_decode.cl; with NORM, EPS.
#define TURN (AT_ONCE / TILES_AT_ONCE)  // pieces per tile at once
#define IN_TILE(p) (ALL_PIECES % (TURN * LOCAL_SIZE) == 0 || (p) < ALL_PIECES)
#include "portable/sum_of_rows.cl"

inline void load_turn(piece pieces[TURN][TILES_AT_ONCE], const operands* o, const int first) {
#pragma unroll
    for (int u = 0; u < TURN; ++u)
        if (IN_TILE(first + u * LOCAL_SIZE))
#pragma unroll
            for (int t = 0; t < TILES_AT_ONCE; ++t) pieces[u][t] = piece_at(o, t, first + u * LOCAL_SIZE);
}

// A work-item's share: own[t] = its pieces' row sums in tile t; square: the squares of its columns, with NORM.
IN_REGISTERS inline void add_pieces(float own[TILES_AT_ONCE][PIECE_ROWS], const operands* o, float* square, const int lid,
                                    const uint power) {
    *square = 0.0f;
#pragma unroll
    for (int t = 0; t < TILES_AT_ONCE; ++t)
#pragma unroll
        for (int i = 0; i < PIECE_ROWS; ++i) own[t][i] = 0.0f;
    piece pieces[TURN][TILES_AT_ONCE];
#if AHEAD
    load_turn(pieces, o, lid);
#endif
#if ONE_TURN_AT_ONCE
#pragma unroll 1
#endif
    for (int first = lid; first < ALL_PIECES; first += TURN * LOCAL_SIZE) {
#if !AHEAD
        load_turn(pieces, o, first);
#endif
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
            const int p = first + u * LOCAL_SIZE;
            if (!IN_TILE(p)) continue;
            const columns c = columns_at(o, p, square, power);
#pragma unroll
            for (int t = 0; t < TILES_AT_ONCE; ++t) {
                add_piece(own[t], &pieces[u][t], &c, p);
#if AHEAD
                const int next = p + TURN * LOCAL_SIZE;
                if (next < ALL_PIECES) pieces[u][t] = piece_at(o, t, next);
#endif
            }
        }
    }
}

#if NORM
#ifndef SQUARE_COPIES
#define SQUARE_COPIES TWINS
#endif
#if SUMS_IN_REGISTERS
#include "common/reduce.cl"
#define NORM_SUMS __local float* const squares = parts
inline float sum_of_squares(const float square, __local float* parts, __local float* squares, const int lid) {
    return reduce_sum(square, parts, lid);
}
#else
#define NORM_SUMS __local float squares[PARTS] __attribute__((aligned(16)))
inline float sum_of_squares(const float square, __local float* parts, __local float* squares, const int lid) {
    parts[lid] = square;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lid < PARTS) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; ++i) sum += parts[lid * 16 + i];
        squares[lid] = sum;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    float sum = 0.0f;
    for (int i = 0; i < PARTS; ++i) sum += squares[i];
    return sum;
}
#endif

// 1 / sqrt(mean(x^2) + EPS) from the work-items' squares, each counted SQUARE_COPIES times. A kernel declares NORM_SUMS.
inline float scale_of_norm(const float square, __local float* parts, __local float* squares, const int lid) {
    return 1.0f / sqrt(NO_OVERFLOW(sum_of_squares(square, parts, squares, lid)) / (SQUARE_COPIES * K) + EPS);
}
#endif

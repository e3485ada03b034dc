// A piece of a floating-point weight tile: 16 bytes in one column, read at once by a work-item.
//
//     piece p:         0          1          2          3     ...     tile memory, 16 values per column (16-bit values here):
//     column:          0          0          1          1             [ rows 0-7 | rows 8-15 ] [ rows 0-7 | ...
//     rows:           0-7        8-15       0-7        8-15           neighbours read neighbouring 16 bytes
//
// portable/quant_piece.cl has the same for quantised weights. After portable/widen.cl. Build: WEIGHT, K, NORM.
#define PIECE_ROWS (16 / (int)sizeof(CAT(WEIGHT, _t)))
#define TWINS (16 / PIECE_ROWS)  // pieces with the same columns
#define N_PIECES (K * TWINS)     // per tile

typedef uint4 piece;
typedef float columns;

// A vector pointer promises an address that is a multiple of 16: one load, where vload8 may become eight.
inline piece load_piece(__global const CAT(WEIGHT, _t)* tile, const int p) { return ((__global const uint4*)tile)[p]; }

#define HIDDEN_POWER(known) 0u  // for quantised weights

// Loads the column values for a piece. squares: accumulates the columns' squares. power: for quantised weights.
inline columns load_columns(__global const float* x, __global const float* norm, const int p, float* squares,
                            const uint power) {
    const float v = x[p / TWINS];
#if NORM
    *squares += v * v;
    return v * norm[p / TWINS];
#else
    return v;
#endif
}

inline columns scaled_columns(const columns x, const float factor) { return x * factor; }

#define ADD_PAIR(i, word)                              \
    {                                                  \
        const float2 v = CAT(widen_, WEIGHT)(w->word); \
        sums[2 * i] += v.x * *x;                       \
        sums[2 * i + 1] += v.y * *x;                   \
    }

// sums[i] += row i of piece number p, times its column.
inline void add_piece(float* sums, const piece* w, const columns* x, const int p) {
#if WEIGHT_IS(f32)
    sums[0] += as_float(w->x) * *x;
    sums[1] += as_float(w->y) * *x;
    sums[2] += as_float(w->z) * *x;
    sums[3] += as_float(w->w) * *x;
#else
    ADD_PAIR(0, x)
    ADD_PAIR(1, y)
    ADD_PAIR(2, z)
    ADD_PAIR(3, w)
#endif
}

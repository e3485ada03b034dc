// y = W x for one token on any device: a work-group per 16-row tile (two tiles with SWIGLU); its work-items share the columns.
// Formula, arguments and build constants as in cpu/linear_decode.cl, except
//   DOT         form of the 8-bit dot product (dot4.cl); undefined: x stays float32. With DOT the work-items first round the
//               columns together (int8_columns.cl), in 9 K / 8 bytes of local memory
//   LOCAL_SIZE  a power of two >= 16
//   VECTORS     vectors per piece of quantised weights: quant_piece.cl
//   AT_ONCE     pieces a work-item has in flight at once, a turn; a multiple of the group's tiles
//   AHEAD       1: requests the next turn's piece as each is used, for many groups; 0: requests a whole turn at once
//
// How the work-items share a tile: portable/tile_product.cl. The norm's sum of squares is computed along with the sums, and its scale
// is applied to the sums.
// Local memory: 4 LOCAL_SIZE (PIECE_ROWS + 2) bytes, PIECE_ROWS 8 with 16-bit weights, else 4; less with sub-groups.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(NORM) || !defined(EPS) || \
    !defined(EPILOGUE) || !defined(LOCAL_SIZE) || !defined(AT_ONCE) || !defined(AHEAD) || \
    !defined(STATE_N_TOKENS)
#error "portable/linear_decode.cl needs the build constants WEIGHT, K, N, N_TILES, NORM, EPS, EPILOGUE, LOCAL_SIZE, AT_ONCE, AHEAD and those of the step state"
#endif
#define INTEL_LANES 16
#include "portable/tile_pieces.cl"

#define TILES_AT_ONCE (EPILOGUE == EPILOGUE_SWIGLU ? 2 : 1)
#define ALL_PIECES N_PIECES

#if DOT
typedef struct {
    __global const CAT(WEIGHT, _t)* tile;
    __local const int* numbers;
    __local const float* scales;
} operands;

inline columns columns_at(const operands* o, const int p, float* square, const uint power) {
    columns found;
    found.scale = o->scales[p / PIECES_OF_GROUP];
    TAKE_COLUMNS(found, o->numbers, p)
    return found;
}

// Rounds the token's columns, times norm weights, by all work-items; returns the squares in a work-item's share.
inline float round_token(__global const float* x, __global const float* norm, __local int* numbers, __local float* scales,
                         const int lid) {
    float squares = 0.0f;
    for (int g = lid; g < K / 32; g += LOCAL_SIZE) {
        float4 v[8];
        int rounded[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            v[j] = ((__global const float4*)x)[8 * g + j];
#if NORM
            squares += dot(v[j], v[j]);
            v[j] *= ((__global const float4*)norm)[8 * g + j];
#endif
        }
        scales[g] = round_columns(v, rounded);
#pragma unroll
        for (int j = 0; j < 8; ++j) numbers[8 * g + j] = rounded[j];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return squares;
}
#define SQUARE_COPIES 1
#else
typedef struct {
    __global const CAT(WEIGHT, _t)* tile;
    __global const float *x, *norm;
} operands;

inline columns columns_at(const operands* o, const int p, float* square, const uint power) {
    return load_columns(o->x, o->norm, p, square, power);
}
#endif
inline piece piece_at(const operands* o, const int t, const int p) { return load_piece(o->tile + t * TILE_SIZE, p); }
#include "portable/tile_product.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1))) REQUIRE_LANES
void linear_decode(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global const float* norm,
                   __global float* out, __global const int* state, const int out_row) {
    ROW_SUMS;
    const int lid = get_local_id(0), unit = get_group_id(0);
    const int n = state[STATE_N_TOKENS];
    const uint power = HIDDEN_POWER(n);
    weight += (size_t)unit * TILES_AT_ONCE * TILE_SIZE;
    x += (size_t)(n - 1) * K;
    float own[TILES_AT_ONCE][PIECE_ROWS], square;
#if DOT
    __local int numbers[K / 4];
    __local float scales[K / 32];
    const float squares_of_share = round_token(x, norm, numbers, scales, lid);
    const operands o = {weight, numbers, scales};
    add_pieces(own, &o, &square, lid, power);
    square = squares_of_share;
#else
    const operands o = {weight, x, norm};
    add_pieces(own, &o, &square, lid, power);
#endif

#if NORM
    NORM_SUMS;
    const float scale = scale_of_norm(square, parts, squares, lid);
#else
    const float scale = 1.0f;
#endif
    float y = sum_of_rows(own[0], sums, parts, lid) * scale;
#if EPILOGUE == EPILOGUE_SWIGLU
    const float up = sum_of_rows(own[1], sums, parts, lid) * scale;
    y = GATE_VALUE(y, exp) * up;
#endif
    const int row = unit * 16 + lid;
    if (lid >= 16 || row >= N) return;
#if EPILOGUE == EPILOGUE_ADD
    y += out[out_row + row];
#endif
    out[out_row + row] = y;
}

// y = W x for one token on any device: one work-group a 16-row tile (two tiles with SWIGLU), its work-items share the columns.
// Formula, arguments and build constants as in cpu/linear_decode.cl, but DOT: x stays float32; and
//   LOCAL_SIZE  work-items of a group, a power of two >= 16
//   AT_ONCE     pieces of a work-item on their way at once, a turn; a multiple of the tiles of a group
//   AHEAD       1: asks for the next turn's piece whenever one was used, which suits many groups; 0: for a turn at once
//
// A tile is cut into pieces of PIECE_ROWS rows by one column or some (float_piece.cl, quant_piece.cl); work-item i takes the
// pieces i, i + LOCAL_SIZE, ..., and always the same rows, whose sums it keeps in registers. The sums over the work-items are
// taken once, at the end:
//
//     sums of the work-items      16 rows of slice 0 | 16 rows of slice 1 | ...      a slice: 16 / PIECE_ROWS neighbours
//     work-item i adds up         row i % 16 of every LOCAL_SIZE / 16-th slice, then work-item i < 16 row i of these sums
//
// The sum of squares for the norm comes along: the norm's scale is a factor of the sums.
// Local memory: 4 LOCAL_SIZE (PIECE_ROWS + 2) bytes, PIECE_ROWS 8 with weights of 16 bits, otherwise 4.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(NORM) || !defined(EPS) || \
    !defined(EPILOGUE) || !defined(LOCAL_SIZE) || !defined(AT_ONCE) || !defined(AHEAD) || \
    !defined(STATE_N_TOKENS)
#error "portable/linear_decode.cl needs the build constants WEIGHT, K, N, N_TILES, NORM, EPS, EPILOGUE, LOCAL_SIZE, AT_ONCE, AHEAD and those of the step state"
#endif
#include "common/tiles.cl"
#include "portable/widen.cl"
#if QUANTIZED
#include "portable/quant_piece.cl"
#else
#include "portable/float_piece.cl"
#endif

#define TILES_AT_ONCE (EPILOGUE == EPILOGUE_SWIGLU ? 2 : 1)
#define TURN (AT_ONCE / TILES_AT_ONCE)  // pieces of a tile at once
#define IN_TILE(p) (N_PIECES % (TURN * LOCAL_SIZE) == 0 || (p) < N_PIECES)
#define PARTS (LOCAL_SIZE / 16)

// The sums over all work-items: of row i in work-item i < 16.
inline float sum_of_rows(const float* own, __local float* sums, __local float* parts, const int lid) {
#pragma unroll
    for (int i = 0; i < PIECE_ROWS; i += 4)
        *(__local float4*)(sums + lid * PIECE_ROWS + i) = (float4)(own[i], own[i + 1], own[i + 2], own[i + 3]);
    barrier(CLK_LOCAL_MEM_FENCE);
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < PIECE_ROWS; ++i) part += sums[lid + i * LOCAL_SIZE];
    parts[lid] = part;
    barrier(CLK_LOCAL_MEM_FENCE);
    float sum = 0.0f;
    if (lid < 16)
        for (int i = 0; i < PARTS; ++i) sum += parts[lid + 16 * i];
    return sum;
}

inline void load_turn(piece pieces[TURN][TILES_AT_ONCE], __global const CAT(WEIGHT, _t)* tile, const int first) {
#pragma unroll
    for (int u = 0; u < TURN; ++u)
        if (IN_TILE(first + u * LOCAL_SIZE))
#pragma unroll
            for (int t = 0; t < TILES_AT_ONCE; ++t)
                pieces[u][t] = load_piece(tile + t * TILE_SIZE, first + u * LOCAL_SIZE);
}

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void linear_decode(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global const float* norm,
                   __global float* out, __global const int* state, const int out_row) {
    __local float sums[LOCAL_SIZE * PIECE_ROWS] __attribute__((aligned(16)));
    __local float parts[LOCAL_SIZE];
    const int lid = get_local_id(0), unit = get_group_id(0);
    __global const CAT(WEIGHT, _t)* tile = weight + (size_t)unit * TILES_AT_ONCE * TILE_SIZE;
    const int n = state[STATE_N_TOKENS];
    const uint big = 0x4b000000u | (uint)n >> 31;  // n is above 0, which the compiler does not know: see quant_piece.cl
    x += (size_t)(n - 1) * K;

    float own[TILES_AT_ONCE][PIECE_ROWS], square = 0.0f;
#pragma unroll
    for (int t = 0; t < TILES_AT_ONCE; ++t)
#pragma unroll
        for (int i = 0; i < PIECE_ROWS; ++i) own[t][i] = 0.0f;
    piece pieces[TURN][TILES_AT_ONCE];
#if AHEAD
    load_turn(pieces, tile, lid);
#endif
    for (int first = lid; first < N_PIECES; first += TURN * LOCAL_SIZE) {
#if !AHEAD
        load_turn(pieces, tile, first);
#endif
#pragma unroll
        for (int u = 0; u < TURN; ++u) {
            const int p = first + u * LOCAL_SIZE;
            if (!IN_TILE(p)) continue;
            const columns c = load_columns(x, norm, p, &square, big);
#pragma unroll
            for (int t = 0; t < TILES_AT_ONCE; ++t) {
                add_piece(own[t], &pieces[u][t], &c, p);
#if AHEAD
                const int next = p + TURN * LOCAL_SIZE;
                if (next < N_PIECES) pieces[u][t] = load_piece(tile + t * TILE_SIZE, next);
#endif
            }
        }
    }

    float scale = 1.0f;
#if NORM
    __local float squares[PARTS];
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
    scale = 1.0f / sqrt(NO_OVERFLOW(sum) / (TWINS * K) + EPS);
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

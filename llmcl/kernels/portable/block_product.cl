// Multiplies a block of tokens by a block of rows, shared by a group's 16 x 16 work-items.
//
//   work-group (16 x 16 work-items)             16 columns k at a time, in local memory:
//        BLOCK_TILES tiles of 16 rows              xs[k][token]         x, transposed
//   t: +-------+-------+                           ws[k][PLACE(row)]    W in float32, even tiles first (stage_rows.cl)
//   o: | A     | B     |   A, B: computed by work-item (tx, ty): tokens ITEM_TOKENS ty and on by ITEM_ROWS / 2 rows in an
//   k: |       |       |         even tile, and the same rows in the next odd tile: gate and up, if the weight has both
//      +-------+-------+
//
// Local memory holds two steps: while one is multiplied the next is loaded, so a step needs a single barrier.
//
// After common/tiles.cl. Build: WEIGHT, K, ITEM_TOKENS and ITEM_ROWS (4 or 8); MAX_REGISTERS (optional) per work-item.
// Local memory: XS_FLOATS and WS_FLOATS floats, twice each: 2048 (ITEM_TOKENS + ITEM_ROWS) + 1024 bytes.
#define BLOCK_TILES ITEM_ROWS
#include "portable/widen.cl"
#include "portable/stage_rows.cl"

#define BLOCK_K 16
#define BLOCK_TOKENS (16 * ITEM_TOKENS)
#define TOKEN_STRIDE (BLOCK_TOKENS + 4)  // spreads the transposing writes over the banks
#define TOKEN_SHARES (ITEM_TOKENS / 4)   // four columns of a token each
#if ITEM_ROWS == 8
typedef float4 run;  // a work-item's rows in a tile
#define RUN 4
#else
typedef float2 run;
#define RUN 2
#endif
#define RUN_AT(p) (*(__local const run*)(p))
#ifdef MAX_REGISTERS  // NVIDIA's compiler only obeys it for kernels without a required group size
#define REQUIRE_ITEMS
#else
#define REQUIRE_ITEMS __attribute__((reqd_work_group_size(16, 16, 1)))
#endif

inline void store_columns(const float4 v, __local float* xs) {
    xs[0] = v.x;
    xs[TOKEN_STRIDE] = v.y;
    xs[2 * TOKEN_STRIDE] = v.z;
    xs[3 * TOKEN_STRIDE] = v.w;
}

#define XS_FLOATS (BLOCK_K * TOKEN_STRIDE)
#define WS_FLOATS (BLOCK_K * ROW_STRIDE)

// acc[i][h]: token ITEM_TOKENS ty + i by the run in the even tile (h = 0) or the odd tile.
// tile, tokens: the work-item's share to load: a tile, and the rows for token lid / 4 and every 64th after, from column 4 (lid % 4) on.
// has_tokens: whether any of these tokens exists. xs, ws: local, float [2][XS_FLOATS], [2][WS_FLOATS].
IN_REGISTERS inline void multiply_block(run acc[ITEM_TOKENS][2], __global const CAT(WEIGHT, _t)* tile,
                                        __global const float* tokens[TOKEN_SHARES], const bool has_tokens,
                                        __local float* xs, __local float* ws, const int tx, const int ty) {
    const int lid = ty * 16 + tx;
    const bool has_share = lid < SHARES;
    __local float* to = xs + lid % 4 * 4 * TOKEN_STRIDE + lid / 4;
    float4 columns[TOKEN_SHARES];
    share rows;
#pragma unroll
    for (int i = 0; i < TOKEN_SHARES; ++i) store_columns(*(__global const float4*)tokens[i], to + 64 * i);
    if (has_share) {
        rows = load_share(tile, 0, lid);
        store_share(&rows, ws, 0, lid);
    }
#pragma unroll
    for (int i = 0; i < ITEM_TOKENS; ++i) acc[i][0] = acc[i][1] = 0.0f;
    int now = 0;
    for (int k = 0; k < K; k += BLOCK_K, now ^= 1) {
        const int next = k + BLOCK_K;
        barrier(CLK_LOCAL_MEM_FENCE);
        if (next < K) {
#pragma unroll
            for (int i = 0; i < TOKEN_SHARES; ++i) columns[i] = *(__global const float4*)(tokens[i] + next);
            if (has_share) rows = load_share(tile, next, lid);
        }
        if (has_tokens) {
            __local const float* x_at = xs + now * XS_FLOATS + ITEM_TOKENS * ty;
            __local const float* w_at = ws + now * WS_FLOATS + RUN * tx;
#pragma unroll
            for (int j = 0; j < BLOCK_K; ++j) {
                const run even = RUN_AT(w_at + j * ROW_STRIDE), odd = RUN_AT(w_at + j * ROW_STRIDE + HALF_ROWS);
#pragma unroll
                for (int i = 0; i < ITEM_TOKENS; i += 4) {
                    const float4 v = *(__local const float4*)(x_at + j * TOKEN_STRIDE + i);
                    acc[i][0] += v.x * even;
                    acc[i][1] += v.x * odd;
                    acc[i + 1][0] += v.y * even;
                    acc[i + 1][1] += v.y * odd;
                    acc[i + 2][0] += v.z * even;
                    acc[i + 2][1] += v.z * odd;
                    acc[i + 3][0] += v.w * even;
                    acc[i + 3][1] += v.w * odd;
                }
            }
        }
        if (next < K) {
#pragma unroll
            for (int i = 0; i < TOKEN_SHARES; ++i)
                store_columns(columns[i], to + (now ^ 1) * XS_FLOATS + 64 * i);
            if (has_share) store_share(&rows, ws + (now ^ 1) * WS_FLOATS, next, lid);
        }
    }
}

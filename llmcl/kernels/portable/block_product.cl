// The product of a block of tokens with a block of rows, shared by the 16 x 16 work-items of a group.
//
//   work-group (16 x 16 work-items)             16 columns k at a time, in local memory:
//        BLOCK_TILES tiles of 16 rows              xs[k][token]         x, transposed
//   t: +-------+-------+                           ws[k][PLACE(row)]    W in float32, even tiles first (stage_rows.cl)
//   o: | A     | B     |   A, B: what work-item (tx, ty) computes: tokens ITEM_TOKENS ty and on by ITEM_ROWS / 2 rows of an
//   k: |       |       |         even tile and the same rows of the odd tile after it: gate and up, where there are such
//      +-------+-------+
//
// Local memory holds two of these steps: while one is multiplied the next is on its way, so that a step has one barrier.
//
// After common/tiles.cl. Build: WEIGHT, K, ITEM_TOKENS and ITEM_ROWS (4 or 8); MAX_REGISTERS, if it is there, of a work-item.
// Local memory: XS_FLOATS and WS_FLOATS floats, twice each: 2048 (ITEM_TOKENS + ITEM_ROWS) + 1024 bytes.
#define BLOCK_TILES ITEM_ROWS
#include "portable/widen.cl"
#include "portable/stage_rows.cl"

#define BLOCK_K 16
#define BLOCK_TOKENS (16 * ITEM_TOKENS)
#define TOKEN_STRIDE (BLOCK_TOKENS + 4)  // keeps the transposing writes off one bank
#define TOKEN_SHARES (ITEM_TOKENS / 4)   // four columns of a token
#if ITEM_ROWS == 8
typedef float4 run;  // the rows of an item in a tile
#define RUN 4
#else
typedef float2 run;
#define RUN 2
#endif
#define RUN_AT(p) (*(__local const run*)(p))
#ifdef MAX_REGISTERS  // NVIDIA's compiler heeds it for kernels alone that do not require a size
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

// acc[i][h]: token ITEM_TOKENS ty + i, the run of rows of the even tile (h 0) and of the odd one.
// tile, tokens: what the work-item brings, a tile and the rows of token lid / 4 and of that 64 on, from column 4 (lid % 4) on.
// has_tokens: whether one of its tokens is there. xs, ws: local, float [2][XS_FLOATS], [2][WS_FLOATS].
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

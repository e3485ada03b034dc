// Y = X W^T for the tokens of a step on any device: a block of tokens by rows a work-group, a tile of it a work-item.
// Formula and arguments as in cpu/linear_prefill.cl.
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
// Index space: (ceil(N_TILES / BLOCK_TILES), ceil(n / (16 ITEM_TOKENS))) groups of (16, 16).
// Build: WEIGHT, K (a multiple of 16), N, N_TILES, OUT_STRIDE, EPILOGUE, ITEM_TOKENS and ITEM_ROWS (4 or 8).
// Local memory: 2048 (ITEM_TOKENS + ITEM_ROWS) + 512 bytes.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(OUT_STRIDE) || \
    !defined(EPILOGUE) || !defined(ITEM_TOKENS) || !defined(ITEM_ROWS) || !defined(STATE_N_TOKENS)
#error "portable/linear_prefill.cl needs the build constants WEIGHT, K, N, N_TILES, OUT_STRIDE, EPILOGUE, ITEM_TOKENS, ITEM_ROWS and those of the step state"
#endif
#define BLOCK_TILES ITEM_ROWS
#include "common/tiles.cl"
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

inline void store_columns(const float4 v, __local float* xs) {
    xs[0] = v.x;
    xs[TOKEN_STRIDE] = v.y;
    xs[2 * TOKEN_STRIDE] = v.z;
    xs[3 * TOKEN_STRIDE] = v.w;
}

__kernel __attribute__((reqd_work_group_size(16, 16, 1)))
void linear_prefill(__global const CAT(WEIGHT, _t)* weight, __global const float* x, __global float* out,
                    __global const int* state, const int out_row) {
    __local float xs[2][BLOCK_K * TOKEN_STRIDE] __attribute__((aligned(16)));
    __local float ws[2][BLOCK_K * ROW_STRIDE] __attribute__((aligned(16)));
    const int n = state[STATE_N_TOKENS];
    const int tx = get_local_id(0), ty = get_local_id(1), lid = ty * 16 + tx;
    const int first_tile = get_group_id(0) * BLOCK_TILES, first_token = get_group_id(1) * BLOCK_TOKENS;

    // What a work-item brings: columns 4 (lid % 4) and on of token lid / 4 (and of that 64 on), and a share of the weights.
    const bool has_share = lid < SHARES;
    __global const CAT(WEIGHT, _t)* tile = weight + min(first_tile + lid / 32 % BLOCK_TILES, N_TILES - 1) * TILE_SIZE;
    __global const float* tokens[TOKEN_SHARES];
    __local float* to = xs[0] + lid % 4 * 4 * TOKEN_STRIDE + lid / 4;
#pragma unroll
    for (int i = 0; i < TOKEN_SHARES; ++i)
        tokens[i] = x + (size_t)min(first_token + lid / 4 + 64 * i, n - 1) * K + lid % 4 * 4;
    float4 columns[TOKEN_SHARES];
    share rows;
#pragma unroll
    for (int i = 0; i < TOKEN_SHARES; ++i) store_columns(*(__global const float4*)tokens[i], to + 64 * i);
    if (has_share) {
        rows = load_share(tile, 0, lid);
        store_share(&rows, ws[0], 0, lid);
    }

    run acc[ITEM_TOKENS][2];
#pragma unroll
    for (int i = 0; i < ITEM_TOKENS; ++i) acc[i][0] = acc[i][1] = 0.0f;
    const bool has_tokens = first_token + ITEM_TOKENS * ty < n;
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
            __local const float* x_at = xs[now] + ITEM_TOKENS * ty;
            __local const float* w_at = ws[now] + RUN * tx;
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
                store_columns(columns[i], to + (now ^ 1) * BLOCK_K * TOKEN_STRIDE + 64 * i);
            if (has_share) store_share(&rows, ws[now ^ 1], next, lid);
        }
    }

    const int tile_pair = tx * RUN / 16, first_in_tile = tx * RUN % 16;
#pragma unroll
    for (int i = 0; i < ITEM_TOKENS; ++i) {
        const int token = first_token + ITEM_TOKENS * ty + i;
        if (token >= n) continue;
        __global float* p = out + (size_t)token * OUT_STRIDE + out_row;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#if EPILOGUE == EPILOGUE_SWIGLU
            if (h == 1) continue;
            const run y = GATE_VALUE(acc[i][0], exp) * acc[i][1];
            const int row = (first_tile / 2 + tile_pair) * 16 + first_in_tile;
#else
            const run y = acc[i][h];
            const int row = (first_tile + 2 * tile_pair + h) * 16 + first_in_tile;
#endif
            float values[RUN];
            CAT(vstore, RUN)(y, 0, values);
            for (int r = 0; r < RUN; ++r) {
                if (row + r >= N) continue;
#if EPILOGUE == EPILOGUE_ADD
                values[r] += p[row + r];
#endif
                p[row + r] = values[r];
            }
        }
    }
}

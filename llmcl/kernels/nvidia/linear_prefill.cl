// Y = X W^T for all tokens of a step on the matrix units of NVIDIA GPUs (sm_80 and later).
// Formula and arguments as in cpu/linear_prefill.cl, except for x: WEIGHT [n][K], from `pack_activations`. Operands have 16 bits,
// sums are float32.
//
// A work-group takes 128 tokens and 8 weight tiles (128 rows), a warp 64 tokens and WARP_TILES tiles. Steps of 32 columns come
// through STAGES buffers in local memory, copied during the products of earlier steps.
//
//            weight rows: 8 tiles of 16                       local memory, 16-byte pieces:
//              +-------+-------+                              X   row r, piece c at 4 r + (c ^ (r / 2) % 4)
//   64 tokens  | warp0 | warp1 |     (WARP_TILES = 4)         W   column k, half c at 2 k + (c ^ (k / 4) % 2)
//              +-------+-------+                              so that the 8 rows that a matrix load reads lie in
//   64 tokens  | warp2 | warp3 |                              8 different groups of banks
//              +-------+-------+
//
// Index space: groups (ceil(n / 128), ceil(N_TILES / 8)) with 64 * 8 / WARP_TILES work-items: concurrent groups share weights,
// which are read once, while X stays in the L2 cache.
// Build: WEIGHT (f16 or bf16), K (a multiple of 32), N, N_TILES, OUT_STRIDE, EPILOGUE, WARP_TILES (2 or 4).
// Local memory: 16384 STAGES bytes.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_TILES) || !defined(OUT_STRIDE) || !defined(EPILOGUE) || \
    !defined(WARP_TILES) || !defined(STATE_N_TOKENS)
#error "nvidia/linear_prefill.cl needs the build constants WEIGHT, K, N, N_TILES, OUT_STRIDE, EPILOGUE, WARP_TILES and those of the step state"
#endif
#include "common/common.cl"
#include "nvidia/ptx.cl"

#define STAGES 3
#define BLOCK_TOKENS 128
#define BLOCK_TILES 8
#define BLOCK_K 32
#define STAGE_BYTES 16384
#define STEPS (K / BLOCK_K)
#define WARPS_ACROSS (BLOCK_TILES / WARP_TILES)
#define GROUP_ITEMS (2 * WARP * WARPS_ACROSS)
#define PIECES_EACH (STAGE_BYTES / 32 / GROUP_ITEMS)  // for X, and as many for W

// Copies a work-item's pieces for the next step, and advances to the following step.
inline void fetch(__global const CAT(WEIGHT, _t)* from_x[PIECES_EACH], __global const CAT(WEIGHT, _t)* from_w[PIECES_EACH],
                  const uint to_x, const uint to_w) {
#pragma unroll
    for (int i = 0; i < PIECES_EACH; ++i) {
        copy16_async(to_x + i * GROUP_ITEMS * 16, from_x[i], true);
        copy16_async(to_w + i * GROUP_ITEMS * 16, from_w[i], true);
        from_x[i] += BLOCK_K;
        from_w[i] += BLOCK_K * 16;
    }
}

__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1)))
void linear_prefill(__global const CAT(WEIGHT, _t)* weight, __global const CAT(WEIGHT, _t)* x, __global float* out,
                    __global const int* state, const int out_row) {
    __local uint4 __attribute__((aligned(128))) buffers[STAGES * STAGE_BYTES / 16];
    const uint local_base = local_address(buffers);
    const int n = state[STATE_N_TOKENS];
    const int lane = get_local_id(0) % WARP, warp = get_local_id(0) / WARP;
    const int first_token = get_group_id(0) * BLOCK_TOKENS, first_tile = get_group_id(1) * BLOCK_TILES;
    const int warp_token = warp / WARPS_ACROSS * 64, warp_tile = warp % WARPS_ACROSS * WARP_TILES;
    if (first_token >= n) return;

    float4 acc[4][2 * WARP_TILES];  // [16 tokens][8 rows]
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 2 * WARP_TILES; ++j) acc[i][j] = 0;

    // A work-item's copies in every step: source, and destination in a stage. In both matrices later pieces are a multiple of 8
    // rows or columns further on, so they keep their place among the banks.
    const int piece = get_local_id(0), x_row = piece / 4, w_k = piece / 2 % 32, c = piece % 4;
    __global const CAT(WEIGHT, _t)* from_x[PIECES_EACH];
    __global const CAT(WEIGHT, _t)* from_w[PIECES_EACH];
#pragma unroll
    for (int i = 0; i < PIECES_EACH; ++i) {
        const int r = min(first_token + x_row + i * GROUP_ITEMS / 4, n - 1);
        const int tile = min(first_tile + piece / 64 + i * GROUP_ITEMS / 64, N_TILES - 1);
        from_x[i] = x + (size_t)r * K + c * 8;
        from_w[i] = weight + ((size_t)tile * K + w_k) * 16 + piece % 2 * 8;
    }
    const uint to_x = local_base + (x_row * 4 + (c ^ ((x_row >> 1) & 3))) * 16;
    const uint to_w = local_base + STAGE_BYTES / 2 + (piece ^ ((w_k >> 2) & 1)) * 16;
    uint to_stage = 0;  // bytes to the destination stage of the next step

#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < STEPS) fetch(from_x, from_w, to_x + to_stage, to_w + to_stage);
        to_stage += STAGE_BYTES;
        copy_commit();
    }
    // Addresses given by a lane: row (matrix & 1) * 8 + lane % 8 in a 16 x 16 piece, its half matrix / 2.
    const int row = lane & 15, half_of = lane >> 4;
    uint xs = local_base + ((warp_token + row) * 4 + (half_of ^ ((row >> 1) & 3))) * 16;
    uint ws = local_base + STAGE_BYTES / 2 + ((warp_tile * BLOCK_K + row) * 2 + (half_of ^ ((row >> 2) & 1))) * 16;
    const uint last = local_base + (STAGES - 1) * STAGE_BYTES;
    for (int step = 0; step < STEPS; ++step) {
        COPY_WAIT(STAGES - 2);
        barrier(CLK_LOCAL_MEM_FENCE);  // the step has arrived, and all work-items have finished with the buffer fetched next
        if (step + STAGES - 1 < STEPS) fetch(from_x, from_w, to_x + to_stage, to_w + to_stage);
        to_stage = to_stage == (STAGES - 1) * STAGE_BYTES ? 0 : to_stage + STAGE_BYTES;
        copy_commit();
#pragma unroll
        for (int kk = 0; kk < BLOCK_K / 16; ++kk) {
            uint4 a[4], b[WARP_TILES];
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = load_matrices((xs ^ (kk * 32)) + i * 1024);
#pragma unroll
            for (int j = 0; j < WARP_TILES; ++j) b[j] = load_matrices_transposed(ws + kk * 512 + j * BLOCK_K * 32);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < WARP_TILES; ++j) {
                    CAT(mma_, WEIGHT)(&acc[i][2 * j], a[i], b[j].x, b[j].y);
                    CAT(mma_, WEIGHT)(&acc[i][2 * j + 1], a[i], b[j].z, b[j].w);
                }
        }
        const uint next = xs >= last ? -(STAGES - 1) * STAGE_BYTES : STAGE_BYTES;
        xs += next;
        ws += next;
    }
    // Lane (g, t) holds rows t, t + 1 for tokens g and g + 8.
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int token = first_token + warp_token + i * 16 + h * 8 + lane / 4;
            if (token >= n) continue;
            __global float* y = out + (size_t)token * OUT_STRIDE + out_row;
#if EPILOGUE == EPILOGUE_SWIGLU
#pragma unroll
            for (int j = 0; j < WARP_TILES; ++j) {  // 8 rows of a gate tile at 4 (j / 2) + j % 2, and of its up tile 2 later
                const int r = (first_tile + warp_tile) / 2 * 16 + j * 8 + 2 * (lane % 4), at = j / 2 * 4 + j % 2;
                const float2 gate = h ? acc[i][at].zw : acc[i][at].xy, up = h ? acc[i][at + 2].zw : acc[i][at + 2].xy;
                const float2 v = GATE_VALUE(gate, exp) * up;
                if (r < N) y[r] = v.x;
                if (r + 1 < N) y[r + 1] = v.y;
            }
#else
#pragma unroll
            for (int j = 0; j < 2 * WARP_TILES; ++j) {
                const int r = (first_tile + warp_tile) * 16 + j * 8 + 2 * (lane % 4);
                float2 v = h ? acc[i][j].zw : acc[i][j].xy;
#if EPILOGUE == EPILOGUE_ADD
                if (r < N) v.x += y[r];
                if (r + 1 < N) v.y += y[r + 1];
#endif
                if (r < N) y[r] = v.x;
                if (r + 1 < N) y[r + 1] = v.y;
            }
#endif
        }
}

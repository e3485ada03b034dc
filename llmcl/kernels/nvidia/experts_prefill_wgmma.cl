// A product of many tokens with the experts that they go to, on the matrix units of Hopper GPUs (wgmma): formula and arguments as in
// portable/experts_prefill.cl, except that x is INPUT [n][K] and products are of 16-bit operands, with float32 sums.
//
// A work-group has 128 slots of an expert, two neighbouring blocks, and 8 tiles of it; each of its two warpgroups one of the blocks.
// Rows of x are gathered as they are copied into local memory, by the places in `order`: layouts of a stage and steps of 32 columns
// as in nvidia/linear_prefill_wgmma.cl. Two work-groups share a compute unit: one multiplies while the other begins or writes.
//
// Weights in mxfp4 become bfloat16, which has all of their values, on the way: a warp widens its tile from the stage into one of three
// buffers while the matrix units work on another.
//
// Index space: (ceil(EXPERT_TILES / 8), blocks) groups of 256. A group whose block is its expert's second, fourth, ... has no work:
// that of the block before has both.
// Build: WEIGHT (f16, bf16 or mxfp4), INPUT (the same, or bf16), K (a multiple of 32), N (a multiple of 16), N_EXPERTS, EXPERT_TILES, SLOTS, EPILOGUE, GATE, BLOCK_ROWS (64).
// Local memory: 98816 bytes; with mxfp4 87296.
#if !defined(WEIGHT) || !defined(INPUT) || !defined(K) || !defined(N) || !defined(N_EXPERTS) || !defined(EXPERT_TILES) || !defined(SLOTS) || \
    !defined(EPILOGUE) || !defined(BLOCK_ROWS)
#error "nvidia/experts_prefill_wgmma.cl needs the build constants WEIGHT, INPUT, K, N, N_EXPERTS, EXPERT_TILES, SLOTS, EPILOGUE, BLOCK_ROWS"
#endif
#include "common/tiles.cl"
#include "common/expert_bias.cl"
#include "nvidia/wgmma.cl"

#if BLOCK_ROWS != 64
#error "nvidia/experts_prefill_wgmma.cl: BLOCK_ROWS is 64"
#endif
#define GROUP_TILES 8
#define BLOCK_K 32
#define GROUP_ITEMS 256
#define X_BYTES (2 * BLOCK_ROWS * BLOCK_K * 2)
#define TILE_BYTES (BLOCK_K * 32)
#define W_BYTES (GROUP_TILES * TILE_BYTES)
#if QUANTIZED
#define STAGE_BYTES (X_BYTES + GROUP_TILES * GROUP_BYTES)
#define WIDENED 3  // buffers: of two steps whose products may be under way, and of the next
#else
#define STAGE_BYTES (X_BYTES + W_BYTES)
#define WIDENED 0
#endif
#define STAGES 6
#define STEPS (K / BLOCK_K)
#define AHEAD (STAGES - 2)  // steps fetched while the products of two others may be under way
#define SUMS (GROUP_TILES * 8)

// APPLY_GATE without exact divisions.
#define SHARE(z) native_divide(1.0f, 1.0f + native_exp(z))
#define GATED(g, u)                                                                                                              \
    (GATE == GATE_CLAMPED_SWIGLU                                                                                                 \
         ? AT_MOST(g, 7.0f, float) * SHARE(-1.702f * AT_MOST(g, 7.0f, float)) *                                                  \
               (AT_LEAST(AT_MOST(u, 7.0f, float), -7.0f, float) + 1.0f)                                                          \
         : (g) * SHARE(GATE_MINUS_Z(g)) * (u))

// What a work-item copies next: a piece of 8 columns of a row of each block, two neighbouring pieces of a tile.
typedef struct {
    __global const CAT(INPUT, _t)*x0, *x1;
    __global const CAT(WEIGHT, _t)* w;
    int step;
    uint to;  // bytes to the stage
} source;

// to_x, to_w: where the work-item's first pieces go in the first stage.
inline void fetch(source* from, const uint to_x, const uint to_w, const bool has_second) {
    if (from->step < STEPS) {
        copy16_async(to_x + from->to, from->x0, true);
        if (has_second) copy16_async(to_x + from->to + X_BYTES / 2, from->x1, true);
#if QUANTIZED
        if (get_local_id(0) % WARP < GROUP_BYTES / 16) copy16_async(to_w + from->to, from->w, true);
#else
        copy16_async(to_w + from->to, from->w, true);
        copy16_async(to_w + from->to + 512, from->w + 256, true);
#endif
        from->x0 += BLOCK_K;
        from->x1 += BLOCK_K;
        from->w += QUANTIZED ? GROUP_BYTES : BLOCK_K * 16;
        from->to = from->to == (STAGES - 1) * STAGE_BYTES ? 0 : from->to + STAGE_BYTES;
        ++from->step;
    }
    copy_commit();
}

#if QUANTIZED
// bfloat16 numbers of two rows' codes, in the upper halves of t's bytes 1 and 3: the bits at their places are 2^-126 of the value.
inline uint widen_codes(const uint t, const uint scales) {
    const uint bits = (t & 0x80008000u) | (t >> 6 & 0x01c001c0u);
    return mul_bf16x2(mul_bf16x2(bits, 0x7e807e80u), scales);
}

// A group of 32 columns of a tile of mxfp4 as wgmma.cl wants it. A lane has two rows of 8 columns; it begins with another column in
// each vector, so that the lanes' writes lie in different banks.
inline void widen_group(__local const uchar* group, const uint to, const int lane) {
    const int vector = lane / 8, rows = lane % 8;
    const uint2 codes = ((__local const uint2*)(group + SCALE_BYTES))[lane];
    const uint exponents = ((__local const ushort*)group)[rows], a = exponents & 255, b = exponents >> 8;
    const uint scales = (a << 7 | (a == 0 || a == 255 ? 0x40 : 0)) | (b << 7 | (b == 0 || b == 255 ? 0x40 : 0)) << 16;
    const uint first = rotate(codes.x, (uint)(32 - 8 * vector) % 32), second = rotate(codes.y, (uint)(32 - 8 * vector) % 32);
    const uint at = to + vector * 128 + (rows * 4 ^ vector % 2 * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint t = permute(first, second, 0x4000 + i * 0x1010), column = (i + vector) % 4;
        store4_local(at + column * 32, widen_codes(t << 4, scales));
        store4_local(at + column * 32 + 512, widen_codes(t, scales));
    }
}
#endif

// The group's place in local memory and what its warps copy and widen.
typedef struct {
    uint x, w;       // where the work-item's first pieces go in the first stage
    uint stages, widened;  // where stages and widened tiles begin
    int lane, warp;
} group_place;

// The products of a warpgroup's 64 slots with 8 tiles, or with both warpgroups on one block with 4: `both` says whether there are two.
inline IN_REGISTERS void multiply(float* acc, source* from, const group_place* at, __local const uint4* buffers, const bool both) {
    const int group = at->warp / 4;
    const ulong a = wgmma_operand(at->stages + (both ? group * (X_BYTES / 2) : 0), 128, BLOCK_K * 16, NO_SWIZZLE);
    const ulong b = wgmma_operand((QUANTIZED ? at->widened : at->stages + X_BYTES) + (both ? 0 : group * (W_BYTES / 2)),
                                  TILE_BYTES, 256, SWIZZLE_32);
    uint stage = 0, w_stage = 0;  // in 16 bytes, as operands count
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) fetch(from, at->x, at->w, both);
#pragma unroll
    for (int i = 0; i < (both ? SUMS : SUMS / 2); ++i) acc[i] = 0;
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
        COPY_WAIT(AHEAD - 1);
#if QUANTIZED
        warp_sync();
        widen_group((__local const uchar*)(buffers + WIDENED * W_BYTES / 16 + stage) + X_BYTES + at->warp * GROUP_BYTES,
                    at->widened + w_stage * 16 + at->warp * TILE_BYTES, at->lane);
#endif
        local_fence_async();
        barrier(CLK_LOCAL_MEM_FENCE);  // the step is there for all, and the one before the last multiplied by all
        fetch(from, at->x, at->w, both);
        wgmma_fence();
        if (both) {
            WGMMA_128(INPUT, acc, a + stage, b + w_stage, 1);
            WGMMA_128(INPUT, acc, a + stage + 256 / 16, b + w_stage + 512 / 16, 1);
        } else {
            WGMMA_64(INPUT, acc, a + stage, b + w_stage, 1);
            WGMMA_64(INPUT, acc, a + stage + 256 / 16, b + w_stage + 512 / 16, 1);
        }
        wgmma_commit();
        WGMMA_WAIT(1);
        stage = stage == (STAGES - 1) * STAGE_BYTES / 16 ? 0 : stage + STAGE_BYTES / 16;
#if QUANTIZED
        w_stage = w_stage == (WIDENED - 1) * W_BYTES / 16 ? 0 : w_stage + W_BYTES / 16;
#else
        w_stage = stage;
#endif
    }
    WGMMA_WAIT(0);
    WGMMA_SETTLE32(acc, 0);
    if (both) WGMMA_SETTLE32(acc, 32);
}

// A warpgroup's sums: of rows 8 j + 2 (lane % 4) + {0, 1} acc[4 j + {0, 1}] of slot lane / 4, acc[4 j + {2, 3}] of the slot 8 later.
// first_row: the warp's first slot; first_tile, tiles: what they are of. bias: of the expert.
inline IN_REGISTERS void write(const float* acc, __local const int* slots, const int count, const int first_row, const int first_tile,
                               const int tiles, __global const float* weights, __global float* out, const int lane,
                               __global const float* bias) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int at_row = first_row + h * 8 + lane / 4;
        if (at_row >= count) continue;
        const int slot = slots[at_row], column = 2 * (lane % 4);
        __global float* y = out + (size_t)slot * N + column;
#if EPILOGUE == EPILOGUE_SWIGLU
#pragma unroll
        for (int j = 0; j < tiles; ++j) {  // 8 rows of a gate tile, those of its up tile 8 sums later
            const int at = (j / 2 * 4 + j % 2) * 4 + 2 * h, to = first_tile * 8 + j * 8;
            if (N % (GROUP_TILES * 8) && to >= N) break;
            float2 gate = (float2)(acc[at], acc[at + 1]), up = (float2)(acc[at + 8], acc[at + 9]);
#if BIAS
            gate += vload2(0, bias + column + to);
            up += vload2(0, bias + column + N + to);
#endif
            *(__global float2*)(y + to) = (float2)(GATED(gate.x, up.x), GATED(gate.y, up.y));
        }
#else
        const float share = weights[slot];
#pragma unroll
        for (int j = 0; j < 2 * tiles; ++j) {
            const int to = first_tile * 16 + j * 8;
            if (N % (GROUP_TILES * 16) && to >= N) break;
            float2 v = (float2)(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
#if BIAS
            v += vload2(0, bias + column + to);
#endif
            *(__global float2*)(y + to) = v * share;
        }
#endif
    }
}

__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1)))
void experts_prefill(__global const CAT(WEIGHT, _t)* weight, __global const CAT(INPUT, _t)* x, __global const int* order,
                     __global const int4* blocks, __global const float* weights, __global float* out,
                     const int first_expert BIAS_PARAM) {
    __local uint4 __attribute__((aligned(1024))) buffers[(STAGES * STAGE_BYTES + WIDENED * W_BYTES) / 16];
    __local int slots[2 * BLOCK_ROWS];
    const int block = get_group_id(1), first_tile = get_group_id(0) * GROUP_TILES;
    const int4 own = blocks[block];
    const int expert = own.x - first_expert;
    if (own.z == 0 || own.w % 2 || expert < 0 || expert >= N_EXPERTS) return;
    int count = own.z;
    if (block + 1 < (int)get_num_groups(1)) {
        const int4 next = blocks[block + 1];
        if (next.x == own.x && next.w == own.w + 1) count += next.z;
    }
    const int lane = get_local_id(0) % WARP, warp = get_local_id(0) / WARP;
    if (get_local_id(0) < 2 * BLOCK_ROWS) slots[get_local_id(0)] = order[own.y + min((int)get_local_id(0), count - 1)];
    barrier(CLK_LOCAL_MEM_FENCE);

    const bool both = count > BLOCK_ROWS;
    const uint widened = local_address(buffers), stages = widened + WIDENED * W_BYTES;
#if QUANTIZED
    const uint to_w = stages + X_BYTES + warp * GROUP_BYTES + lane * 16;
#else
    const uint to_w = stages + X_BYTES + warp * TILE_BYTES + (lane ^ ((lane >> 3) & 1)) * 16;
#endif
    const group_place at = {stages + get_local_id(0) * 16, to_w, stages, widened, lane, warp};
    const int row = warp * 8 + lane % 8, tile = min(first_tile + warp, EXPERT_TILES - 1);
    source from;
    from.x0 = x + (size_t)(slots[row] / SLOTS) * K + lane / 8 * 8;
    from.x1 = x + (size_t)(slots[BLOCK_ROWS + row] / SLOTS) * K + lane / 8 * 8;
    from.w = weight + ((size_t)expert * EXPERT_TILES + tile) * TILE_SIZE + lane * (QUANTIZED ? 16 : 8);
    from.step = 0;
    from.to = 0;
#if BIAS
    bias += (size_t)own.x * EXPERT_TILES * 16;
#else
    __global const float* bias = 0;
#endif
    if (both) {
        float acc[SUMS];
        multiply(acc, &from, &at, buffers, true);
        write(acc, slots, count, warp * 16, first_tile, GROUP_TILES, weights, out, lane, bias);
    } else {
        float acc[SUMS / 2];
        multiply(acc, &from, &at, buffers, false);
        write(acc, slots, count, warp % 4 * 16, first_tile + warp / 4 * (GROUP_TILES / 2), GROUP_TILES / 2, weights, out, lane, bias);
        asm volatile("" : : : "memory");  // keeps the branches' writes apart: with sums in common the products would not overlap
    }
}

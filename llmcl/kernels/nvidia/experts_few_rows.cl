// experts_prefill for the few tokens of a step on the matrix units of NVIDIA GPUs (sm_80 and later; mxfp4, too): each chosen expert's
// weights are read once for a block of its tokens, as nvidia/linear_few_rows.cl reads a weight.
// Formula and arguments as in portable/experts_prefill.cl, except that x is OPERAND in blocks of 8 x 8 (`pack_activations`), of
// tokens or of slots, and so is out with OUT; without, it is float32. A block has at most 8 slots.
//
// Index space: any number of groups of 32 WARPS, among which the TILES tiles of each block go round. With CHAINED it is a function of
// nvidia/few_rows_chain.cl, `experts_unit`: `chosen` counts the groups that have left order, blocks and weights, which are done when
// it is chosen_count. A group asks for the first weights of its experts then, before x is there.
// Build: WEIGHT, K (a multiple of 32), N, N_EXPERTS, EXPERT_TILES, SLOTS, EPILOGUE, GATE, OUT or none, TILES (1, 2 or 4; with a gate 2
// or 4), WARPS, STAGES (3 or more), DEPTH. Local memory: LOCAL_BYTES of nvidia/linear_few_rows.cl.
#if !defined(N_EXPERTS) || !defined(EXPERT_TILES) || !defined(SLOTS)
#error "nvidia/experts_few_rows.cl needs the build constants named in its head"
#endif
#define EXPERTS 1
#define N_TILES EXPERT_TILES
#define OUT_STRIDE N
#define MAX_ROWS 8
#define LEAVES 0
#define SCALED 0
#ifdef OUT
#define PACKED_OUT 1
#else
#define PACKED_OUT 0
#endif
#include "common/expert_bias.cl"
#include "nvidia/linear_few_rows.cl"

#define UNITS ((EXPERT_TILES + TILES - 1) / TILES)
#if CHAINED
#define LOAD_INT(p) as_int(load_shared_float((__global const float*)(p)))
#define LOAD_FLOAT(p) load_shared_float(p)
#else
#define LOAD_INT(p) (*(p))
#define LOAD_FLOAT(p) (*(p))
#endif

// A block's first number (block), and TILES tiles of its expert from `tile` on. done, count: what it waits for before it reads x.
inline void add_experts(const int4 block, const int tile, __local uint4* buffers, volatile __global const uint* done, const uint count,
                        __global const uchar* weight, __global const uint4* x, __global const int* order,
                        __global const float* weights, __global void* out, const int first_expert BIAS_PARAM) {
    const int lane = get_local_id(0) % WARP, warp = get_local_id(0) / WARP, n = block.z, t = lane % 4 * 2;
    const int slot = LOAD_INT(order + block.y + min(lane % 8, n - 1)), row = slot / SLOTS;
    const int2 rows = (int2)(shuffle_int_from(slot, t), shuffle_int_from(slot, t + 1));
    const __local uchar* stages = (const __local uchar*)buffers + warp * (STAGES * STAGE_BYTES);
    // Of a block of 8 x 8 the lane copies 8 columns of its token.
    const source from = {weight + ((size_t)(block.x - first_expert) * EXPERT_TILES + tile) * TILE_BYTES,
                         x + (size_t)(row / 8) * K + lane / 8 * 8 + row % 8, N_TILES - tile, lane, 0, n - lane % 8};
    float4 acc[BLOCKS][TILES];
    add_pieces(acc, &from, stages, warp, done, count, 0, 0, 0, n);
#if EPILOGUE == EPILOGUE_STORE
    const float2 factors = (float2)(LOAD_FLOAT(weights + rows.x), LOAD_FLOAT(weights + rows.y));
#else
    const float2 factors = 1.0f;
#endif
#if BIAS
    bias += (size_t)block.x * EXPERT_TILES * 16;
#else
    __global const float* bias = 0;
#endif
    const target to = {out, 0, 0, 0, 0, 0, n, true, rows, factors, bias};
    add_warps(acc, buffers, &to, tile, warp, lane);
}

// What group number `group` of `groups` does.
inline void experts_unit(const int group, const int groups, __local uint4* buffers, volatile __global const uint* done, uint count,
                         volatile __global const uint* chosen, const uint chosen_count, __global const uchar* weight,
                         __global const uint4* x, __global const int* order, __global const int* blocks,
                         __global const float* weights, __global void* out, const int first_expert BIAS_PARAM) {
#if CHAINED
    wait_until(chosen, chosen_count);
#endif
    const int items = LOAD_INT(blocks + 3) * UNITS;
    for (int item = group; item < items; item += groups) {
        __global const int* at = blocks + item / UNITS * 4;
        const int4 block = (int4)(LOAD_INT(at), LOAD_INT(at + 1), LOAD_INT(at + 2), 0);
        if (block.x < first_expert || block.x >= first_expert + N_EXPERTS) continue;
        if (item != group) barrier(CLK_LOCAL_MEM_FENCE);  // all have taken the sums of the one before
        add_experts(block, item % UNITS * TILES, buffers, done, count, weight, x, order, weights, out, first_expert BIAS_ARG);
        count = 0;
    }
}

#if !CHAINED
__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1)))
void experts_few_rows(__global const uchar* weight, __global const uint4* x, __global const int* order, __global const int* blocks,
                      __global const float* weights, __global void* out, const int first_expert BIAS_PARAM) {
    __local uint4 __attribute__((aligned(128))) buffers[LOCAL_BYTES / 16];
    experts_unit(get_group_id(0), get_num_groups(0), buffers, 0, 0, 0, 0, weight, x, order, blocks, weights, out,
                 first_expert BIAS_ARG);
}
#endif

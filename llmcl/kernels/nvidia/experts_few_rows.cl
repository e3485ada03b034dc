// experts_prefill for the few tokens of a step on the matrix units of NVIDIA GPUs (sm_80 and later; mxfp4, too): each chosen
// expert's weights are read once per block of tokens, in the same way as in nvidia/linear_few_rows.cl.
// Formula and arguments as in portable/experts_prefill.cl, except for x: OPERAND in blocks of 8 x 8 (`pack_activations`), with rows
// of tokens or slots. With OUT, the output has the same layout; otherwise it is float32. A block has at most 8 slots.
//
// Index space: any number of groups with 32 WARPS work-items; the groups take units (TILES tiles of a block) in turn. With CHAINED
// the file is the function `experts_unit` in nvidia/few_rows_chain.cl: `chosen` counts the groups that have left order, blocks and
// weights; all are done at chosen_count. A group then requests its experts' first weights before x arrives.
// Build: WEIGHT, K (a multiple of 32), N, N_EXPERTS, EXPERT_TILES, SLOTS, EPILOGUE, GATE, OUT or none, TILES (1, 2 or 4; with a
// gate 2 or 4), WARPS, STAGES (3 or more), DEPTH. Local memory: LOCAL_BYTES in nvidia/linear_few_rows.cl.
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

// A group's unit: TILES tiles of a block from `tile` on. slot: the slot for the lane's row of x.
typedef struct {
    source from;
    int expert, tile, slot, n;  // n: slots
} work;

// Finds item `number` or the next item of the group (every `groups`-th) whose expert is in this buffer, and fills in `found`.
inline int find_work(work* found, int number, const int items, const int groups, __global const uchar* weight, __global const uint4* x,
                     __global const int* order, __global const int* blocks, const int first_expert) {
    const int lane = get_local_id(0) % WARP;
    int expert = 0;
    for (; number < items; number += groups) {
        expert = LOAD_INT(blocks + number / UNITS * 4);
        if (expert >= first_expert && expert < first_expert + N_EXPERTS) break;
    }
    found->from.lane = lane;
    found->from.first = 0;
    found->from.tokens = NO_TOKENS;
    if (number >= items) return items;
    const int first = LOAD_INT(blocks + number / UNITS * 4 + 1);
    found->n = LOAD_INT(blocks + number / UNITS * 4 + 2);
    found->expert = expert;
    found->tile = number % UNITS * TILES;
    found->slot = LOAD_INT(order + first + min(lane % 8, found->n - 1));
    const int row = found->slot / SLOTS;
    found->from.weight = weight + ((size_t)(expert - first_expert) * EXPERT_TILES + found->tile) * TILE_BYTES;
    found->from.x = x + (size_t)(row / 8) * K + lane / 8 * 8 + row % 8;  // the lane copies 8 columns of its token in an 8 x 8 block
    found->from.tiles = N_TILES - found->tile;
    found->from.tokens = found->n - lane % 8;
    return number;
}

// The work of group number `group` of `groups`. done, count: the wait before reading x.
inline void experts_unit(const int group, const int groups, __local uint4* buffers, volatile __global const uint* done,
                         const uint count, volatile __global const uint* chosen, const uint chosen_count,
                         __global const uchar* weight, __global const uint4* x, __global const int* order,
                         __global const int* blocks, __global const float* weights, __global void* out,
                         const int first_expert BIAS_PARAM) {
    const int lane = get_local_id(0) % WARP, warp = get_local_id(0) / WARP, t = lane % 4 * 2;
    const __local uchar* stages = (const __local uchar*)buffers + warp * (STAGES * STAGE_BYTES);
    __local uint4* sums = buffers + WARPS * STAGES * STAGE_BYTES / 16;
#if CHAINED
    wait_until(chosen, chosen_count);
#endif
    const int items = LOAD_INT(blocks + 3) * UNITS;
    work now, next;
    int number = find_work(&now, group, items, groups, weight, x, order, blocks, first_expert), at = 0;
    if (number < items) begin_pieces(&now.from, local_address(stages), warp, done, count, 0);
    for (int turn = 0; number < items; ++turn) {
        number = find_work(&next, number + groups, items, groups, weight, x, order, blocks, first_expert);
        float4 acc[BLOCKS][TILES];
        add_pieces(acc, &now.from, &next.from, stages, &at, warp, done, 0, 0, 0, 0, 0, now.n);
        const int2 rows = (int2)(shuffle_int_from(now.slot, t), shuffle_int_from(now.slot, t + 1));
#if EPILOGUE == EPILOGUE_STORE
        const float2 factors = (float2)(LOAD_FLOAT(weights + rows.x), LOAD_FLOAT(weights + rows.y));
#else
        const float2 factors = 1.0f;
#endif
#if BIAS
        __global const float* of_expert = bias + (size_t)now.expert * EXPERT_TILES * 16;
#else
        __global const float* of_expert = 0;
#endif
        const target to = {out, 0, 0, 0, 0, 0, now.n, true, rows, factors, of_expert};
        add_warps(acc, sums + turn % 2 * (WARPS * SUM_BYTES / 16), &to, now.tile, warp, turn % WARPS, lane);
        now = next;
    }
    COPY_WAIT_ALL;
    barrier(CLK_LOCAL_MEM_FENCE);
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

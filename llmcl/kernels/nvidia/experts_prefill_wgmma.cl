// A product of many tokens with their experts, on the matrix units of Hopper GPUs (wgmma): formula and arguments as in
// portable/experts_prefill.cl, except for x: INPUT [n][K]. Operands have 16 bits, sums are float32.
//
// A work-group takes one unit after the other: up to 192 slots of an expert (a block) by UNIT_TILES tiles. Each of its three
// warpgroups has 64 slots and all rows, or no work if the block has fewer slots. Most experts' weights are thus read once. Rows of
// x are gathered during the copy into local memory, through the places in `order`. Steps of 32 columns come through STAGES buffers,
// copied during the products of earlier steps. The next unit's first steps are copied while the last unit's results are written. A
// unit's row places are requested a unit ahead.
//
//     a stage:  X   64 bytes per row; four neighbouring lanes copy 16 bytes each: ROWS_64 in wgmma.cl
//               W   tiles as in nvidia/linear_prefill_wgmma.cl
//
// Quantised weights are converted to INPUT on the way: each warp widens a tile of a stage into one of three buffers while the
// matrix units work on another buffer (nvidia/widen_group.cl). A unit then has as many tiles as a group has warps.
//
// Index space: any number of groups with 384 work-items; a unit's tiles change fastest, so that groups share rows while they run.
// Build: WEIGHT, INPUT (f16 or bf16: WEIGHT itself, bf16 for mxfp4, f16 for other quantised types), K (a multiple of 32, or 256 for
// the k formats), N (a multiple of 16), N_EXPERTS, EXPERT_TILES, SLOTS, EPILOGUE, GATE, BLOCK_ROWS (192), OUT (f16 or bf16;
// undefined: float32) for the output.
// Local memory: 200704 bytes; with quantised weights at most 150528.
#if !defined(WEIGHT) || !defined(INPUT) || !defined(K) || !defined(N) || !defined(N_EXPERTS) || !defined(EXPERT_TILES) || \
    !defined(SLOTS) || !defined(EPILOGUE) || !defined(BLOCK_ROWS)
#error "nvidia/experts_prefill_wgmma.cl needs the build constants named in its head"
#endif
#include "common/tiles.cl"
#include "common/expert_bias.cl"
#include "nvidia/wgmma.cl"

#if BLOCK_ROWS != 192
#error "nvidia/experts_prefill_wgmma.cl: BLOCK_ROWS is 192"
#endif
#define BLOCK_K 32
#define GROUP_ITEMS 384
#define X_BYTES (BLOCK_ROWS * BLOCK_K * 2)
#define TILE_BYTES (BLOCK_K * 32)
#define W_BYTES (UNIT_TILES * TILE_BYTES)
#if QUANTIZED
#include "nvidia/widen_group.cl"
#define UNIT_TILES 12
#define MULTIPLY WGMMA_192
#define STAGE_BYTES (X_BYTES + (UNIT_TILES * PIECE_BYTES + 511) / 512 * 512)
#define STAGES 6
#define WIDENED 3  // buffers: two for steps with running products, and one for the next step
#else
#define UNIT_TILES 16
#define MULTIPLY WGMMA_256
#define STAGE_BYTES (X_BYTES + W_BYTES)
#define STAGES 7
#define TILES_APART (GROUP_ITEMS / 64)  // distance between the tiles copied by a work-item
#define WIDENED 0
#endif
#define STEPS (K / BLOCK_K)
#define AHEAD (STAGES - 2)  // steps fetched ahead while two other steps' products may be running
#define SUMS (UNIT_TILES * 8)
#define ROW_UNITS ((EXPERT_TILES + UNIT_TILES - 1) / UNIT_TILES)

// APPLY_GATE without exact divisions.
#define SHARE(z) native_divide(1.0f, 1.0f + native_exp(z))
#define GATED(g, u)                                                                                                              \
    (GATE == GATE_CLAMPED_SWIGLU                                                                                                 \
         ? AT_MOST(g, 7.0f, float) * SHARE(-1.702f * AT_MOST(g, 7.0f, float)) *                                                  \
               (AT_LEAST(AT_MOST(u, 7.0f, float), -7.0f, float) + 1.0f)                                                          \
         : (g) * SHARE(GATE_MINUS_Z(g)) * (u))

// Units in turn, from the blocks whose experts are in this buffer.
typedef struct {
    __global const int4* blocks;
    int n_units, first_expert;
} unit_list;

// Returns a unit's block, without slots if there is no such unit or its expert is in another buffer.
inline int4 block_of(const unit_list* list, const int unit) {
    const int4 none = (int4)(list->first_expert, 0, 0, 0);
    if (unit >= list->n_units) return none;
    const int4 block = list->blocks[unit / ROW_UNITS];
    return block.x < list->first_expert || block.x >= list->first_expert + N_EXPERTS ? none : block;
}

// A work-item's next copies: pieces of 8 columns from two rows, 96 apart, and pieces of a step's tiles. Also data about the next
// unit, loaded ahead: its block, the rows, and the block after.
typedef struct {
    __global const CAT(INPUT, _t)*x0, *x1;
    __global const CAT(WEIGHT, _t)* w;
    int tiles[3];  // offsets from the work-item's first tile to its next two tiles, in weight elements ([0] is unused)
    int unit, step;
    uint to;  // bytes to the stage
    int4 next, after;
    int row0, row1;
    bool has0, has1;  // the block has the rows; for missing rows local memory may hold anything
} source;

// Places in `order` for the work-item's two rows of a block.
inline int row_at(const int4 block, const int row) { return block.y + min(row, max(block.z, 1) - 1); }
#define OWN_ROW ((int)get_local_id(0) / 4)

// Begins the unit with block and rows from `next`.
inline void begin_unit(source* from, const unit_list* list, __global const CAT(WEIGHT, _t)* weight, __global const CAT(INPUT, _t)* x,
                       __global const int* order) {
    const int item = get_local_id(0), first_tile = from->unit % ROW_UNITS * UNIT_TILES;
    const int4 block = from->next;
    from->x0 = x + (size_t)(from->row0 / SLOTS) * K + item % 4 * 8;
    from->x1 = x + (size_t)(from->row1 / SLOTS) * K + item % 4 * 8;
    from->has0 = OWN_ROW < block.z;
    from->has1 = OWN_ROW + BLOCK_ROWS / 2 < block.z;
    const size_t expert = (size_t)(block.x - list->first_expert) * EXPERT_TILES;
#if QUANTIZED
    const int tile = first_tile + item / WARP, own = PIECE_SLOT_AT(item % WARP);
#else
    const int tile = first_tile + item / 64, own = item % 64 * 8;
#endif
    from->w = weight + (expert + min(tile, EXPERT_TILES - 1)) * TILE_SIZE + own;
#if !QUANTIZED
#pragma unroll
    for (int i = 1; i < 3; ++i)
        from->tiles[i] = (EXPERT_TILES % UNIT_TILES ? min(i * TILES_APART, max(EXPERT_TILES - 1 - tile, 0)) : i * TILES_APART) *
                         (int)TILE_SIZE;
#endif
    from->step = 0;
    from->next = from->after;
    from->row0 = order[row_at(from->next, OWN_ROW)];
    from->row1 = order[row_at(from->next, OWN_ROW + BLOCK_ROWS / 2)];
    from->after = block_of(list, from->unit + 2 * (int)get_num_groups(0));
}

// to_x, to_w: destinations for the work-item's first pieces in the first stage.
inline void fetch(source* from, const uint to_x, const uint to_w, const unit_list* list, __global const CAT(WEIGHT, _t)* weight,
                  __global const CAT(INPUT, _t)* x, __global const int* order) {
    if (from->unit < list->n_units) {
        const int item = get_local_id(0);
        if (from->has0) copy16_async(to_x + from->to, from->x0, true);
        if (from->has1) copy16_async(to_x + from->to + X_BYTES / 2, from->x1, true);
        from->x0 += BLOCK_K;
        from->x1 += BLOCK_K;
#if QUANTIZED
        const int slot = item % WARP;  // a warp copies the tile that it widens
        if (slot < PIECE_SLOTS) copy16_async(to_w + from->to, from->w, true);
#if WEIGHT_IS(q8_0)  // q8_0 has more slots than a warp has lanes
        if (slot < PIECE_SLOTS - WARP) copy16_async(to_w + from->to + WARP * 16, from->w + WARP * 16, true);
#endif
        from->w += PIECE_SLOT_STEP(slot, from->step);
#else
        copy16_async(to_w + from->to, from->w, true);
        copy16_async(to_w + from->to + TILES_APART * TILE_BYTES, from->w + from->tiles[1], true);
        if (item < 256) copy16_async(to_w + from->to + 2 * TILES_APART * TILE_BYTES, from->w + from->tiles[2], true);
        from->w += BLOCK_K * 16;
#endif
        from->to = from->to == (STAGES - 1) * STAGE_BYTES ? 0 : from->to + STAGE_BYTES;
        if (++from->step == STEPS) {
            from->unit += get_num_groups(0);
            begin_unit(from, list, weight, x, order);
        }
    }
    copy_commit();
}

#ifdef OUT
inline void write2(__global CAT(OUT, _t)* y, const int at, const float2 v) {
    *(__global uint*)(y + at) = CAT(narrow_, OUT)(v.x, v.y);
}
#else
#define OUT f32
inline void write2(__global float* y, const int at, const float2 v) { *(__global float2*)(y + at) = v; }
#endif

// Writes a warpgroup's sums: acc[4 j + {0, 1}] for rows 8 j + 2 (lane % 4) + {0, 1} of slot lane / 4, acc[4 j + {2, 3}] for the
// slot 8 later. slots: both slots, or -1. bias: the expert's bias.
inline IN_REGISTERS void write(const float* acc, const int slots[2], const int first_tile, __global const float* weights,
                               __global CAT(OUT, _t)* out, const int lane, __global const float* bias) {
    const int column = 2 * (lane % 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int slot = slots[h];
        if (slot < 0) continue;
        __global CAT(OUT, _t)* y = out + (size_t)slot * N + column;
#if EPILOGUE == EPILOGUE_SWIGLU
#pragma unroll
        for (int j = 0; j < UNIT_TILES; ++j) {  // 8 rows of a gate tile; its up tile is 8 sums later
            const int at = (j / 2 * 4 + j % 2) * 4 + 2 * h, to = first_tile * 8 + j * 8;
            if (N % (UNIT_TILES * 8) && to >= N) break;
            float2 gate = (float2)(acc[at], acc[at + 1]), up = (float2)(acc[at + 8], acc[at + 9]);
#if BIAS
            gate += vload2(0, bias + column + to);
            up += vload2(0, bias + column + N + to);
#endif
            write2(y, to, (float2)(GATED(gate.x, up.x), GATED(gate.y, up.y)));
        }
#else
        const float share = weights[slot];
#pragma unroll
        for (int j = 0; j < 2 * UNIT_TILES; ++j) {
            const int to = first_tile * 16 + j * 8;
            if (N % (UNIT_TILES * 16) && to >= N) break;
            float2 v = (float2)(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
#if BIAS
            v += vload2(0, bias + column + to);
#endif
            write2(y, to, v * share);
        }
#endif
    }
}

__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1)))
void experts_prefill(__global const CAT(WEIGHT, _t)* weight, __global const CAT(INPUT, _t)* x, __global const int* order,
                     __global const int4* blocks, __global const float* weights, __global CAT(OUT, _t)* out,
                     const int first_expert BIAS_PARAM) {
    __local uint4 __attribute__((aligned(1024))) buffers[(STAGES * STAGE_BYTES + WIDENED * W_BYTES) / 16];
    const int item = get_local_id(0), lane = item % WARP, warp = item / WARP, n_groups = get_num_groups(0);
    const unit_list list = {blocks, blocks[0].w * ROW_UNITS, first_expert};
    const uint widened = local_address(buffers), stages = widened + WIDENED * W_BYTES;
    const uint to_x = stages + item / 4 * 64 + (item % 4 ^ item / 8 % 4) * 16;
#if QUANTIZED
    const uint to_w = stages + X_BYTES + warp * PIECE_BYTES + lane * 16;
#else
    const uint to_w = stages + X_BYTES + item / 64 * TILE_BYTES + (item % 64 ^ (item >> 3 & 1)) * 16;
#endif
    source from;
    from.unit = get_group_id(0);
    from.to = 0;
    from.next = block_of(&list, from.unit);
    from.row0 = order[row_at(from.next, OWN_ROW)];
    from.row1 = order[row_at(from.next, OWN_ROW + BLOCK_ROWS / 2)];
    from.after = block_of(&list, from.unit + n_groups);
    int4 now, next = from.next;
    begin_unit(&from, &list, weight, x, order);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) fetch(&from, to_x, to_w, &list, weight, x, order);

    const ulong a = wgmma_operand(stages + warp / 4 * (X_BYTES / 3), 16, 8 * BLOCK_K * 2, ROWS_64);
    const ulong b = wgmma_operand(QUANTIZED ? widened : stages + X_BYTES, TILE_BYTES, 256, SWIZZLE_32);
    uint stage = 0, w_stage = 0;  // in units of 16 bytes, as in operands
#if QUANTIZED
#define WIDEN_STEP                                                                                                        \
    warp_sync();                                                                                                          \
    widen_group((__local const uchar*)(buffers + WIDENED * W_BYTES / 16 + stage) + X_BYTES + warp * PIECE_BYTES,          \
                widened + w_stage * 16 + warp * TILE_BYTES, lane);
#else
#define WIDEN_STEP
#endif
// All warpgroups do this work before a step's products, and after.
#define BEGIN_STEP                                                                                                 \
    COPY_WAIT(AHEAD - 1);                                                                                          \
    WIDEN_STEP                                                                                                     \
    local_fence_async();                                                                                           \
    barrier(CLK_LOCAL_MEM_FENCE); /* the step is there for all, and the one before the last multiplied by all */   \
    fetch(&from, to_x, to_w, &list, weight, x, order);
#define END_STEP                                                                                  \
    stage = stage == (STAGES - 1) * STAGE_BYTES / 16 ? 0 : stage + STAGE_BYTES / 16;              \
    w_stage = !QUANTIZED ? stage : w_stage == (WIDENED - 1) * W_BYTES / 16 ? 0 : w_stage + W_BYTES / 16;
    for (int unit = get_group_id(0); unit < list.n_units; unit += n_groups) {
        now = next;
        next = block_of(&list, unit + n_groups);
        const int first_row = warp * 16 + lane / 4, first_tile = unit % ROW_UNITS * UNIT_TILES;
        if (warp / 4 * 64 >= now.z) {  // the warpgroup has no work
#pragma unroll 1
            for (int step = 0; step < STEPS; ++step) {
                BEGIN_STEP
                END_STEP
            }
            continue;
        }
        int slots[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) slots[h] = first_row + 8 * h < now.z ? order[now.y + first_row + 8 * h] : -1;
        float acc[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) acc[i] = 0;
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            BEGIN_STEP
            wgmma_fence();
            MULTIPLY(INPUT, acc, a + stage, b + w_stage, 1);
            MULTIPLY(INPUT, acc, a + stage + 32 / 16, b + w_stage + 512 / 16, 1);
            wgmma_commit();
            WGMMA_WAIT(1);
            END_STEP
        }
        WGMMA_WAIT(0);
        WGMMA_SETTLE32(acc, 0);
        WGMMA_SETTLE32(acc, 32);
        WGMMA_SETTLE32(acc, 64);
#if UNIT_TILES == 16
        WGMMA_SETTLE32(acc, 96);
#endif
#if BIAS
        write(acc, slots, first_tile, weights, out, lane, bias + (size_t)now.x * EXPERT_TILES * 16);
#else
        write(acc, slots, first_tile, weights, out, lane, 0);
#endif
    }
}

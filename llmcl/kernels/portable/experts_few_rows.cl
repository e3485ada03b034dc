// Multiplies few tokens by their experts on any device: a work-group processes a block with few slots for one expert.
// Formula and arguments as in portable/experts_prefill.cl, except for blocks with up to BLOCK_ROWS slots, ROWS per work-group.
//
// Index space: (blocks BLOCK_ROWS / ROWS, units) groups, local size LOCAL_SIZE; a unit: a tile, or with SWIGLU a gate and an up tile.
// Groups
// with the same unit are neighbours: a single group reads an expert's unit from memory, the rest from a cache.
// How the work-items share a tile: portable/few_rows_product.cl. Blocks with one or two slots have separate loops.
// Build: WEIGHT, K, N (both multiples of 16), N_EXPERTS, EXPERT_TILES, SLOTS, EPILOGUE, GATE, BLOCK_ROWS (a multiple of ROWS),
// ROWS, LOCAL_SIZE (a power of two >= 16).
// Local memory: 4 LOCAL_SIZE (PIECE_ROWS + 1) bytes, PIECE_ROWS 8 with 16-bit weights, else 4; less with sub-groups.
#if !defined(WEIGHT) || !defined(K) || !defined(N) || !defined(N_EXPERTS) || !defined(EXPERT_TILES) || !defined(SLOTS) || \
    !defined(EPILOGUE) || !defined(BLOCK_ROWS) || !defined(ROWS) || !defined(LOCAL_SIZE)
#error "portable/experts_few_rows.cl needs the build constants WEIGHT, K, N, N_EXPERTS, EXPERT_TILES, SLOTS, EPILOGUE, BLOCK_ROWS, ROWS, LOCAL_SIZE"
#endif
#define TILES_AT_ONCE (EPILOGUE == EPILOGUE_SWIGLU ? 2 : 1)
#include "portable/few_rows_product.cl"
#include "common/expert_bias.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1))) REQUIRE_LANES
void experts_few_rows(__global const CAT(WEIGHT, _t)* weight, __global const row_t* x, __global const int* order,
                      __global const int4* blocks, __global const float* weights, __global float* out,
                      const int first_expert BIAS_PARAM) {
    ROW_SUMS;
    const int parts_of_block = BLOCK_ROWS / ROWS, first = (int)get_group_id(0) % parts_of_block * ROWS;
    const int4 block = blocks[(int)get_group_id(0) / parts_of_block];
    const int expert = block.x - first_expert, n = min(block.z - first, ROWS);
    if (n <= 0 || expert < 0 || expert >= N_EXPERTS) return;
    const int lid = get_local_id(0), unit = get_group_id(1);
    const uint power = HIDDEN_POWER(expert);
    __global const CAT(WEIGHT, _t)* tile = weight + ((size_t)expert * EXPERT_TILES + unit * TILES_AT_ONCE) * TILE_SIZE;
    int slots[ROWS];
    __global const row_t* rows[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        slots[r] = order[block.y + first + min(r, n - 1)];
        rows[r] = x + (size_t)(slots[r] / SLOTS) * ROW_STRIDE;
    }
    float own[TILES_AT_ONCE][ROWS][PIECE_ROWS];
    if (n == 1)
        add_rows(own, tile, rows, 1, lid, power);
    else if (ROWS > 2 && n == 2)
        add_rows(own, tile, rows, 2, lid, power);
    else
        add_rows(own, tile, rows, ROWS, lid, power);
    const int row = unit * 16 + lid;
#if BIAS
    bias += (size_t)block.x * EXPERT_TILES * 16;
#endif
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {  // missing slots too: PoCL 3.0 miscompiles barriers in a branch
        float y = sum_of_rows(own[0][r], sums, parts, lid);
#if EPILOGUE == EPILOGUE_SWIGLU
        float up = sum_of_rows(own[1][r], sums, parts, lid);
#endif
        if (lid < 16 && r < n) {
#if BIAS
            y += bias[row];
#endif
#if EPILOGUE == EPILOGUE_SWIGLU
#if BIAS
            up += bias[N + row];
#endif
            y = APPLY_GATE(y, up, exp, float);
#else
            y *= weights[slots[r]];
#endif
            out[(size_t)slots[r] * N + row] = y;
        }
    }
}

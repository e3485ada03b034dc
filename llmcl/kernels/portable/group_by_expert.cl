// Sorts a step's token slots by expert, and cuts each expert's slots into blocks.
//
//   order   = the slots t TOP_K + s for all tokens t, by expert; any order within an expert
//   blocks  = (expert, first index in order, slot count <= BLOCK_ROWS, in the first block the number of blocks);
//             the rest are zeros
//
// ids  int [n][TOP_K], distinct per token     order  int [n TOP_K]     blocks  int4 [(n TOP_K + (BLOCK_ROWS - 1) min(N_EXPERTS, n
// TOP_K)) / BLOCK_ROWS]
// state  int, see STATE_*
// Index space: one work-group, local size LOCAL_SIZE. Build: N_EXPERTS, TOP_K, BLOCK_ROWS, LOCAL_SIZE, step state constants.
// Local memory: 4 N_EXPERTS bytes, none with a LOCAL_SIZE of 1.
#if !defined(N_EXPERTS) || !defined(TOP_K) || !defined(BLOCK_ROWS) || !defined(LOCAL_SIZE) || !defined(STATE_N_TOKENS)
#error "group_by_expert.cl needs the build constants N_EXPERTS, TOP_K, BLOCK_ROWS, LOCAL_SIZE and those of the step state"
#endif
#include "common/group_memory.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void group_by_expert(__global const int* ids, __global int* order, __global int4* blocks, __global const int* state) {
    OF_GROUP int places[N_EXPERTS];  // an expert's slot count, then the index for its next slot
    const int lid = get_local_id(0), n = state[STATE_N_TOKENS] * TOP_K;
    for (int e = lid; e < N_EXPERTS; e += LOCAL_SIZE) places[e] = 0;
    WAIT;
    for (int i = lid; i < n; i += LOCAL_SIZE) TAKE_NEXT(places + ids[i]);
    WAIT;
    if (lid == 0) {
        int first = 0, block = 0;
        for (int e = 0; e < N_EXPERTS; ++e) {
            const int count = places[e];
            for (int i = 0; i < count; i += BLOCK_ROWS)
                blocks[block++] = (int4)(e, first + i, min(BLOCK_ROWS, count - i), 0);
            places[e] = first;
            first += count;
        }
        blocks[0].w = block;
        const int n_blocks = (n + (BLOCK_ROWS - 1) * min(N_EXPERTS, n)) / BLOCK_ROWS;
        for (; block < n_blocks; ++block) blocks[block] = (int4)(0);
    }
    WAIT;
    for (int i = lid; i < n; i += LOCAL_SIZE) order[TAKE_NEXT(places + ids[i])] = i;
}

// The block of at most BLOCK_M queries that a work-group takes: rows t0 to before n of the step, row t at `position` + t of its sequence.
//
// Blocks are counted from the beginning of the one sequence there is; or (built with STATE_PIECES, an expression of the step's `state`)
// they are pieces of runs of several sequences, in the order of a table, those that see the most keys first (step_rows.cl).
// `state` of a block is where the page table of its sequence is found (kv_address.cl).
#include "common/step_rows.cl"

typedef struct {
    __global const int* state;
    int t0, n, position;
} query_block;

inline query_block query_block_at(__global const int* state, const int number) {
#ifdef STATE_PIECES
    const int4 piece = piece_at(state, number);
    query_block block = {sequence_at(state, piece.x), piece.y, piece.y + piece.z, piece.w - piece.y};
#else
    query_block block = {state, number * BLOCK_M, state[STATE_N_TOKENS], state[STATE_POSITION]};
#endif
    return block;
}

// The block of a work-group of an index space of `count`, such that those with the longest rows begin first.
#ifdef STATE_PIECES
#define LONGEST_FIRST(number, count) (number)
#else
#define LONGEST_FIRST(number, count) ((count)-1 - (number))
#endif

// A work-group's block of at most BLOCK_M queries: rows t0 to before n of the step, row t at `position` + t in its sequence.
//
// With a single sequence, blocks count from its beginning. With STATE_PIECES (an expression in the step's `state`), blocks are
// pieces of runs of several sequences, in table order: pieces that see the most keys come first (step_rows.cl).
// A block's `state` locates the page table of its sequence (kv_address.cl).
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

// The block number for a work-group in an index space of `count`: the longest rows begin first.
#ifdef STATE_PIECES
#define LONGEST_FIRST(number, count) (number)
#else
#define LONGEST_FIRST(number, count) ((count)-1 - (number))
#endif

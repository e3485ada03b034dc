// Where the cache holds a key and its value: the hook of every kernel that reads or appends them.
//
//   row = kv_row(state, position)        v_cache: row HEAD_DIM        k_cache: row / 16 HEAD_DIM 16 + row % 16
//
// Contiguous (no KV_PAGE): the row is the position. Paged: the rows of the cache are a pool of pages of KV_PAGE keys, and the
// step state holds the page table of the sequence from slot STATE_PAGES on. KV_PAGE is a multiple of 64 and so of every
// BLOCK_N: a tile of keys that starts at a multiple of BLOCK_N lies in one page, and one look-up serves it.
#ifdef KV_PAGE
#ifndef STATE_PAGES
#error "kv_address.cl needs the build constant STATE_PAGES with KV_PAGE"
#endif
inline int kv_row(__global const int* state, const int position) {
    return state[STATE_PAGES + position / KV_PAGE] * KV_PAGE + position % KV_PAGE;
}
#else
#define kv_row(state, position) (position)
#endif

// Where the cache holds a key and its value: the hook of every kernel that reads or appends them.
//
//   row = kv_row(state, position)        v_cache: row HEAD_DIM        k_cache: row / 16 HEAD_DIM 16 + row % 16
//
// Contiguous (no KV_PAGE): the row is the position. Paged: the rows of the cache are a pool of pages of KV_PAGE keys, and the
// step state holds the page table of the sequence from slot STATE_PAGES on. KV_PAGE is a multiple of 64 and so of every
// BLOCK_N: a tile of keys that starts at a multiple of BLOCK_N lies in one page, and one look-up serves it.
// A look-up takes its time: kv_page asks, and row_in_page, which uses the answer, may come later.
//
// In attention on arrays the page table is an array of its own, PAGE_TABLE (an expression, int*), and pages are PAGE_ROWS rows
// (an expression) apart.
#ifdef KV_PAGE
#ifdef PAGE_TABLE
#define kv_page(state, position) ((PAGE_TABLE)[(position) / KV_PAGE])
#define row_in_page(page, position) ((page) * (PAGE_ROWS) + (position) % KV_PAGE)
#else
#ifndef STATE_PAGES
#error "kv_address.cl needs the build constant STATE_PAGES or PAGE_TABLE with KV_PAGE"
#endif
#define kv_page(state, position) ((state)[STATE_PAGES + (position) / KV_PAGE])
#define row_in_page(page, position) ((page) * KV_PAGE + (position) % KV_PAGE)
#endif
#else
#define kv_page(state, position) 0
#define row_in_page(page, position) (position)
#endif
#ifdef PAGE_TABLE
#define kv_row(state, position) row_in_page(kv_page(state, position), position)  // the expressions name what a kernel has
#else
inline int kv_row(__global const int* state, const int position) {
    return row_in_page(kv_page(state, position), position);
}
#endif

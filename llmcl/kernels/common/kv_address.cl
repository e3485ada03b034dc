// Maps a position to the cache row of its key and value: the hook in every kernel that reads or appends keys.
//
//   row = kv_row(state, position)        v_cache: row HEAD_DIM        k_cache: row / 16 HEAD_DIM 16 + row % 16
//
// Contiguous (no KV_PAGE): the row is the position. Paged: the cache rows form a pool of pages with KV_PAGE keys each, and the step
// state holds the sequence's page table from slot STATE_PAGES on. KV_PAGE is a multiple of 64, and therefore of every BLOCK_N: a
// tile of keys that starts at a multiple of BLOCK_N lies in a single page, and a single look-up is enough. A look-up takes time:
// kv_page starts the load, and row_in_page, which uses the result, may come later.
//
// In attention on arrays, the page table is a separate array PAGE_TABLE (an expression, int*), and pages are PAGE_ROWS rows (an
// expression) apart.
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
#define kv_row(state, position) row_in_page(kv_page(state, position), position)  // the expressions refer to names in the kernel
#else
inline int kv_row(__global const int* state, const int position) {
    return row_in_page(kv_page(state, position), position);
}
#endif

// Which blocks of keys the queries of a block see: a BlockMask on the device, one int buffer.
//
//   blocks = { Q_BLOCKS, most, batches, heads,  then for each [batches][heads][Q_BLOCKS] a record of 2 + most ints:
//              n_partial, n_full, indices of the partial blocks, then of the full ones }
//
// batches and heads are 1 where the mask is the same for all. Blocks are Q_BLOCK queries by KV_BLOCK keys (build constants
// with BLOCK_LISTS): Q_BLOCK a multiple of a work-group's query rows, KV_BLOCK a multiple of 16, so that tiles stay aligned.
#if BLOCK_LISTS
#if !defined(Q_BLOCK) || !defined(KV_BLOCK) || !defined(N_KEYS)
#error "block lists need the build constants Q_BLOCK, KV_BLOCK and N_KEYS"
#endif
#if defined(KV_PAGE) && KV_BLOCK % BLOCK_N
#error "with pages KV_BLOCK is a multiple of BLOCK_N, so that no tile straddles two pages"
#endif

typedef struct {
    int n_partial, n_full;
    __global const int* indices;
    int n_keys;
} block_list;

inline block_list find_blocks(__global const int* blocks, const int batch, const int head, const int t0, const int n_keys) {
    const int q_blocks = blocks[0], most = blocks[1], batches = blocks[2], heads = blocks[3];
    const size_t record = ((size_t)(batch % batches) * heads + head % heads) * q_blocks + t0 / Q_BLOCK;
    __global const int* at = blocks + 4 + record * (2 + most);
    block_list list = {at[0], at[1], at + 2, n_keys};
    return list;
}

// The keys of the i-th listed block, partial ones first: from x to before y.
inline int2 block_keys(const block_list list, const int i) {
    const int first = list.indices[i] * KV_BLOCK;
    return (int2)(first, min(first + KV_BLOCK, list.n_keys));
}
#endif

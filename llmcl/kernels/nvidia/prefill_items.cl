// Shared by the warpgroup prefill kernels: key tiles, the items that a group takes one after the other, and exponentials and
// weights for fragments. Include after query_block.cl, with KV, BLOCK_M, BLOCK_N and N_Q_HEADS.

// A tile of keys: first position, key count, visibility (TILE_*), and a flag for an item's last tile.
typedef struct {
    int first, n_keys, seen_as, last;
} tile;

// A group's item: rows from t0 on of a head. With several sequences, the item has its own row end and its own offset from row to
// position; otherwise both are the step's.
typedef struct {
    int head, t0;
#ifdef STATE_PIECES
    int n, position, place;
#endif
} item;
#ifdef STATE_PIECES
#define END_OF(it) ((it).n)
#define POSITION_OF(it) ((it).position)
#define STATE_OF(it) sequence_at(state, (it).place)
#else
#define END_OF(it) n
#define POSITION_OF(it) position
#define STATE_OF(it) state
#endif

// Returns a group's item in turn number `turn`; t0 < 0: none. Items are dealt back and forth, so that groups get equal shares
// although items become smaller and smaller.
inline item item_of(const int turn, const int n, __global const int* state, __global const int* ranges) {
    const int groups = get_num_groups(0), group = get_group_id(0);
    const int number = turn * groups + (turn & 1 ? groups - 1 - group : group);
    item it = {0, -1};
#ifdef STATE_PIECES
    if (number < (N_PIECES) * N_Q_HEADS) {
        const int4 piece = piece_at(state, number / N_Q_HEADS);
        it.head = number % N_Q_HEADS;
        it.t0 = piece.y;
        it.n = piece.y + piece.z;
        it.position = piece.w - piece.y;
        it.place = piece.x;
    }
#else
    const int blocks = (n + BLOCK_M - 1) / BLOCK_M;
    if (number < blocks * N_Q_HEADS) {
#ifdef ORDER
        const int at = ranges[(ORDER) + number];
#else
        const int at = blocks * N_Q_HEADS - 1 - number;  // rows that see more keys come first
#endif
        it.head = at % N_Q_HEADS;
        it.t0 = at / N_Q_HEADS * BLOCK_M;
    }
#endif
    return it;
}
#define TAKE(turn) item_of(turn, n, state, ranges)

inline void narrow_weights(uint4 p[BLOCK_N / 16], const float s[BLOCK_N / 2]) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 16; ++i)
        p[i] = (uint4)(CAT(narrow_weights_, KV)(s[8 * i], s[8 * i + 1]), CAT(narrow_weights_, KV)(s[8 * i + 2], s[8 * i + 3]),
                       CAT(narrow_weights_, KV)(s[8 * i + 4], s[8 * i + 5]), CAT(narrow_weights_, KV)(s[8 * i + 6], s[8 * i + 7]));
}

// The tiles of keys that a group of queries sees, one after the other across ranges (kv_block_ranges.cl): copies need not stop
// between ranges. After kv_block_ranges.cl, with BLOCK_N.

// A tile of keys: those from j on of a range of keys; none if the range is (0, 0).
typedef struct {
    int j;
    int2 range;
} tile_coord;

inline int class_of(const tile_coord at, const int batch, const int head, const int2 rows MOD_PARAMS) {
    return class_in_range(at.range, batch, head, rows, at.j, min(at.j + BLOCK_N, at.range.y) MOD_ARGS);
}

// The first tile after `at` that a query of the group sees a key of.
inline tile_coord tile_after(tile_coord at, kv_block_ranges* left, const int batch, const int head, const int2 rows MOD_PARAMS) {
    do {
        at.j += BLOCK_N;
        if (at.j >= at.range.y) {
            at.range = take_range(left);
            at.j = RANGE_FIRST(at.range);
        }
    } while (at.range.y > 0 && class_of(at, batch, head, rows MOD_ARGS) == TILE_EMPTY);
    return at;
}

// The key tiles seen by a group of queries, one after the other across ranges (kv_block_ranges.cl): copies continue from range to
// range. Include after kv_block_ranges.cl, with BLOCK_N.

// A tile of keys in a range, from j on; no tile if the range is (0, 0).
typedef struct {
    int j;
    int2 range;
} tile_coord;

inline int class_of(const tile_coord at, const int batch, const int head, const int2 rows MOD_PARAMS) {
    return class_in_range(at.range, batch, head, rows, at.j, min(at.j + BLOCK_N, at.range.y) MOD_ARGS);
}

// Returns the first visible tile after `at`.
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

// Maps a source row to a row of the weight: row 16 t + r of the weight is row r of tile t.
//
// head_dim > 0: rows belong to heads, and the first rotary_dim rows of a head rotate. Rotary pair p becomes rows p and p +
// head_dim/2. In the source, pair p is rows 2 p and 2 p + 1 (interleaved), or p and p + rotary_dim/2. Rows without rotation fill
// the remaining places, in order. tile_step 2 with tile_offset 0 or 1 places tile t at 2 t + offset.
inline int tile_row(int row, const int head_dim, const int rotary_dim, const int interleaved, const int tile_step,
                    const int tile_offset) {
    if (head_dim > 0) {
        const int i = row % head_dim;
        const int rest = i - rotary_dim, half_rest = (head_dim - rotary_dim) / 2;
        const int pair = interleaved ? i / 2 : i % (rotary_dim / 2), second = interleaved ? i % 2 : i / (rotary_dim / 2);
        const int to = rest < 0          ? pair + second * (head_dim / 2)
                     : rest < half_rest  ? rotary_dim / 2 + rest
                                         : head_dim / 2 + rotary_dim / 2 + rest - half_rest;
        row += to - i;
    }
    return (row / 16 * tile_step + tile_offset) * 16 + row % 16;
}

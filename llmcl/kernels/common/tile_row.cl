// Where a source row goes: row 16 t + r of the weight is row r of its tile t.
//
// ROPE_HEAD_DIM > 0: row 2 i + s of a head becomes row s ROPE_HEAD_DIM/2 + i. TILE_STEP 2 with TILE_OFFSET 0 or 1 places
// tile t at 2 t + offset.
inline int tile_row(int row) {
#if ROPE_HEAD_DIM > 0
    const int i = row % ROPE_HEAD_DIM;
    row += (i % 2) * (ROPE_HEAD_DIM / 2) + i / 2 - i;
#endif
    return (row / 16 * TILE_STEP + TILE_OFFSET) * 16 + row % 16;
}

// Where a source row goes: row 16 t + r of the weight is row r of its tile t.
//
// ROPE_HEAD_DIM > 0: rows of heads of which the first ROTARY_DIM rotate. Rotary pair p becomes rows p and
// p + ROPE_HEAD_DIM/2; it is stored as rows 2 p and 2 p + 1 with ROPE_INTERLEAVED, else as p and p + ROTARY_DIM/2. The
// rows that do not rotate fill what is left, in order. TILE_STEP 2 with TILE_OFFSET 0 or 1 places tile t at 2 t + offset.
inline int tile_row(int row) {
#if ROPE_HEAD_DIM > 0
    const int i = row % ROPE_HEAD_DIM;
    const int rest = i - ROTARY_DIM, half_rest = (ROPE_HEAD_DIM - ROTARY_DIM) / 2;
#if ROPE_INTERLEAVED
    const int pair = i / 2, second = i % 2;
#else
    const int pair = i % (ROTARY_DIM / 2), second = i / (ROTARY_DIM / 2);
#endif
    const int to = rest < 0          ? pair + second * (ROPE_HEAD_DIM / 2)
                 : rest < half_rest  ? ROTARY_DIM / 2 + rest
                                     : ROPE_HEAD_DIM / 2 + ROTARY_DIM / 2 + rest - half_rest;
    row += to - i;
#endif
    return (row / 16 * TILE_STEP + TILE_OFFSET) * 16 + row % 16;
}

// Matrices with other numbers of rows and columns, in another storage type: cut off, or filled up with zeros.
//
// from     FROM [matrices][rows][COLUMNS]          to       TO [matrices][to_rows][TO_COLUMNS]
//
// Index space: groups (ceil(TO_COLUMNS / 16), to_rows, matrices) of (16, 1, 1).
// Build: FROM, TO (f32 or f16), COLUMNS, TO_COLUMNS.
#if !defined(FROM) || !defined(TO) || !defined(COLUMNS) || !defined(TO_COLUMNS)
#error "pad_rows.cl needs the build constants FROM, TO, COLUMNS, TO_COLUMNS"
#endif
#include "common/common.cl"

__kernel __attribute__((reqd_work_group_size(16, 1, 1)))
void pad_rows(__global const CAT(FROM, _t)* from, __global CAT(TO, _t)* to, const int rows, const int to_rows) {
    const int column = get_global_id(0), row = get_group_id(1), matrix = get_group_id(2);
    if (column >= TO_COLUMNS) return;
    // The address, not the load, depends on the condition: Intel's CPU driver miscompiles a half load in a branch.
    const bool inside = row < rows && column < COLUMNS;
    const float value = CAT(load1_, FROM)(from + (inside ? ((size_t)matrix * rows + row) * COLUMNS + column : 0));
    CAT(store1_, TO)(inside ? value : 0.0f, to + ((size_t)matrix * to_rows + row) * TO_COLUMNS + column);
}

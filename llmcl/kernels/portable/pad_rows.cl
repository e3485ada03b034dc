// Resizes matrices and converts their storage type: rows and columns are cut off or padded with zeros.
//
// from     FROM [matrices][rows][columns]          to       TO [matrices][to_rows][to_columns]
//
// With PAGED, matrices are heads of sequences, with rows in pages: from FROM [pages][heads][page_rows][columns], row i
// of sequence b in page table[b][i / page_rows]; table int [sequences][n_pages].
//
// Index space: groups (ceil(to_columns / 16), to_rows, matrices), local size (16, 1, 1).
// Build: FROM, TO (f32, f16 or bf16), PAGED.
#if !defined(FROM) || !defined(TO) || !defined(PAGED)
#error "pad_rows.cl needs the build constants FROM, TO, PAGED"
#endif
#include "common/common.cl"

__kernel __attribute__((reqd_work_group_size(16, 1, 1)))
void pad_rows(__global const CAT(FROM, _t)* from, __global CAT(TO, _t)* to, const int rows, const int columns,
              const int to_rows, const int to_columns
#if PAGED
              , __global const int* table, const int n_pages, const int page_rows, const int heads
#endif
) {
    const int column = get_global_id(0), row = get_group_id(1), matrix = get_group_id(2);
    if (column >= to_columns) return;
#if PAGED
    const int of_page = min(row, rows - 1);
    // The sequence may have no page there yet (-1): no query sees these keys.
    const int page = max(table[matrix / heads * n_pages + of_page / page_rows], 0);
    const size_t source = ((size_t)page * heads + matrix % heads) * page_rows + of_page % page_rows;
#else
    const size_t source = (size_t)matrix * rows + row;
#endif
    // The address, not the load, depends on the condition: Intel's CPU driver miscompiles a half load in a branch.
    const bool inside = row < rows && column < columns;
    const float value = CAT(load1_, FROM)(from + (inside ? source * columns + column : 0));
    CAT(store1_, TO)(inside ? value : 0.0f, to + ((size_t)matrix * to_rows + row) * to_columns + column);
}

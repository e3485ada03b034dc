// Gathers the step's wanted rows: out[i] = x[wanted[i]], with int wanted[m] at state + WANTED.
//
// x  float [n][COLUMNS]     out  float [m][COLUMNS]     state  step state with several sequences: see ragged_step.py
// Index space: a work-group per wanted row, local size LOCAL_SIZE. Build: COLUMNS (a multiple of 4), LOCAL_SIZE, WANTED (an expression
// in `state`).
#if !defined(COLUMNS) || !defined(LOCAL_SIZE) || !defined(WANTED)
#error "gather_rows.cl needs the build constants COLUMNS, LOCAL_SIZE and WANTED"
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void gather_rows(__global const int* state, __global const float* x, __global float* out) {
    const size_t to = get_group_id(0), from = state[(WANTED) + to];
    for (int i = 4 * get_local_id(0); i < COLUMNS; i += 4 * LOCAL_SIZE) vstore4(vload4(0, x + from * COLUMNS + i), 0, out + to * COLUMNS + i);
}

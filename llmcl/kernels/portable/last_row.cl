// x[0] = x[n - 1]: what the last of a step's tokens needs where it becomes the only one (last_token.cl, which comes after it).
//
// state  int, see STATE_*     x  float [n][COLUMNS]
// Index space: one work-group of LOCAL_SIZE. Build: COLUMNS, LOCAL_SIZE, those of the step state.
#if !defined(COLUMNS) || !defined(LOCAL_SIZE) || !defined(STATE_N_TOKENS)
#error "last_row.cl needs the build constants COLUMNS, LOCAL_SIZE and those of the step state"
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void last_row(__global const int* state, __global float* x) {
    const size_t last = state[STATE_N_TOKENS] - 1;
    for (int i = get_local_id(0); i < COLUMNS; i += LOCAL_SIZE) x[i] = x[last * COLUMNS + i];
}

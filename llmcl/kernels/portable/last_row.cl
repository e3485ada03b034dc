// x[0] = x[n - 1]: keeps the last token's row before last_token.cl makes it the only token.
//
// state  int, see STATE_*     x  float [n][COLUMNS]
// Index space: one work-group, local size LOCAL_SIZE. Build: COLUMNS, LOCAL_SIZE, step state constants.
#if !defined(COLUMNS) || !defined(LOCAL_SIZE) || !defined(STATE_N_TOKENS)
#error "last_row.cl needs the build constants COLUMNS, LOCAL_SIZE and those of the step state"
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void last_row(__global const int* state, __global float* x) {
    const size_t last = state[STATE_N_TOKENS] - 1;
    for (int i = get_local_id(0); i < COLUMNS; i += LOCAL_SIZE) x[i] = x[last * COLUMNS + i];
}

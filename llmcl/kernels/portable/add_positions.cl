// x[t] += positions[p] + types[p >= second ? 1 : 0] for a step's consecutive tokens, p = position + t.
//
// state      int, see STATE_*            second     int [1]: position of the second text of a pair
// positions  float [rows][COLUMNS], more rows than the last position      types  float [1 or 2][COLUMNS]
// x          float [n][COLUMNS]
// Index space: groups (ceil(COLUMNS / LOCAL_SIZE), n), local size LOCAL_SIZE; a work-item per value.
// Build: COLUMNS, LOCAL_SIZE and the constants of the step state.
// The host must have checked the last position, and that types has two rows where a second text begins.
#if !defined(COLUMNS) || !defined(LOCAL_SIZE) || !defined(STATE_POSITION)
#error "add_positions.cl needs the build constants COLUMNS, LOCAL_SIZE, STATE_POSITION"
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void add_positions(__global const int* state, __global const float* positions, __global const float* types,
                   __global const int* second, __global float* x) {
    const int column = get_global_id(0), t = get_group_id(1), position = state[STATE_POSITION] + t;
    if (column >= COLUMNS) return;
    const int type = position >= second[0] ? 1 : 0;
    x[(size_t)t * COLUMNS + column] += positions[(size_t)position * COLUMNS + column] + types[type * COLUMNS + column];
}

// Makes the step's last token its only token, so later kernels skip all others.
//
//   x[0] = x[n - 1];  qkv[0] = qkv[n - 1];  then position += n - 1, n = 1 in the step's state
//
// state  int, see STATE_*     x  float [n][HIDDEN]     qkv  float [n][QKV]
// Index space: one work-group, local size LOCAL_SIZE. Build: HIDDEN, QKV, LOCAL_SIZE, step state constants.
#if !defined(HIDDEN) || !defined(QKV) || !defined(LOCAL_SIZE) || !defined(STATE_POSITION) || !defined(STATE_N_TOKENS)
#error "last_token.cl needs the build constants HIDDEN, QKV, LOCAL_SIZE and those of the step state"
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void last_token(__global int* state, __global float* x, __global float* qkv) {
    const size_t last = state[STATE_N_TOKENS] - 1;
    for (int i = get_local_id(0); i < HIDDEN; i += LOCAL_SIZE) x[i] = x[last * HIDDEN + i];
    for (int i = get_local_id(0); i < QKV; i += LOCAL_SIZE) qkv[i] = qkv[last * QKV + i];
    barrier(CLK_GLOBAL_MEM_FENCE);
    if (get_local_id(0) == 0) {
        state[STATE_POSITION] += (int)last;
        state[STATE_N_TOKENS] = 1;
    }
}

// pooled = one row for a text, over the steps that read the text. A step has rows t < n at positions `position` + t.
//
//   POOLING 0, mean:   pooled = (position pooled + sum_t x[t]) / (position + n)
//   POOLING 1, first:  pooled = x[0] in the step at position 0
//   POOLING 2, last:   pooled = x[n - 1]
//
// state   int, see STATE_*      x  float [n][HIDDEN]      rows  float [ROW + 1][HIDDEN]; pooled is row ROW, read only if position > 0
// Index space: a work-item per column, local size LOCAL_SIZE.
// Build: HIDDEN, POOLING, ROW, LOCAL_SIZE and the constants of the step state.
// Float32 sums over the rows in order; within 1e-6 sqrt(n) of the rows' magnitude.
#if !defined(HIDDEN) || !defined(POOLING) || !defined(ROW) || !defined(LOCAL_SIZE) || \
    !defined(STATE_POSITION) || !defined(STATE_N_TOKENS)
#error "pool.cl needs the build constants HIDDEN, POOLING, ROW, LOCAL_SIZE, STATE_POSITION, STATE_N_TOKENS"
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void pool(__global const int* state, __global const float* x, __global float* rows) {
    const int column = get_global_id(0), n = state[STATE_N_TOKENS], position = state[STATE_POSITION];
    if (column >= HIDDEN) return;
    __global float* pooled = rows + (size_t)ROW * HIDDEN;
#if POOLING == 0
    float sum = position > 0 ? pooled[column] * position : 0.0f;
    for (int t = 0; t < n; ++t) sum += x[(size_t)t * HIDDEN + column];
    pooled[column] = sum / (position + n);
#elif POOLING == 1
    if (position == 0) pooled[column] = x[column];
#else
    pooled[column] = x[(size_t)(n - 1) * HIDDEN + column];
#endif
}

// x = CAP tanh(x / CAP), in place: bounds a model's logits (Gemma Team, "Gemma 2", 2024).
//
// x  float [n][N]
// Index space: groups (ceil(N / (8 RUN)), n), local size LOCAL_SIZE; a group's work-items share RUN 8-wide pieces.
// Build: N, CAP, RUN (a multiple of LOCAL_SIZE), LOCAL_SIZE.
#if !defined(N) || !defined(CAP) || !defined(RUN) || !defined(LOCAL_SIZE)
#error "soft_cap.cl needs the build constants N, CAP, RUN, LOCAL_SIZE"
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void soft_cap(__global float* x) {
    x += (size_t)get_group_id(1) * N;
    for (int piece = get_local_id(0); piece < RUN; piece += LOCAL_SIZE) {
        const int i = (get_group_id(0) * RUN + piece) * 8;
        if (i + 8 <= N) {
            vstore8(CAP * tanh(vload8(0, x + i) / CAP), 0, x + i);
        } else {
            for (int rest = i; rest < N; ++rest) x[rest] = CAP * tanh(x[rest] / CAP);
        }
    }
}

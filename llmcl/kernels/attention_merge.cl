// Merges the partial online-softmax states that decode attention left for each split of the keys.
//
//   m = max_s m_s;   out = sum_s exp(m_s - m) acc_s / sum_s exp(m_s - m) l_s
//
// part_ml  float [N_Q_HEADS][N_SPLITS][2] (m, l)    part_acc  float [N_Q_HEADS][N_SPLITS][HEAD_DIM]
// out      float [N_Q_HEADS][HEAD_DIM]
// Index space: one work-group of LOCAL_SIZE a query head; work-items share its 16-wide columns.
// Build: N_SPLITS, HEAD_DIM, LOCAL_SIZE.
#if !defined(N_SPLITS) || !defined(HEAD_DIM) || !defined(LOCAL_SIZE)
#error "attention_merge.cl needs the build constants N_SPLITS, HEAD_DIM, LOCAL_SIZE"
#endif
#include "common.cl"
#include "online_softmax.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void attention_merge(__global const float* part_ml, __global const float* part_acc, __global float* out) {
    const int head = get_group_id(0);
    part_ml += head * N_SPLITS * 2;
    part_acc += (size_t)head * N_SPLITS * HEAD_DIM;

    float m = -INFINITY, l = 0.0f;
    for (int s = 0; s < N_SPLITS; ++s) m = fmax(m, part_ml[2 * s]);
    for (int s = 0; s < N_SPLITS; ++s) l += softmax_weight(part_ml[2 * s], m) * part_ml[2 * s + 1];
    const float norm = softmax_norm(l);
    for (int i = get_local_id(0); i < HEAD_DIM / 16; i += LOCAL_SIZE) {
        float16 acc = 0;
        for (int s = 0; s < N_SPLITS; ++s) {
            const float weight = softmax_weight(part_ml[2 * s], m);
            // An empty split wrote no accumulator.
            if (weight > 0.0f) acc += weight * load16_f32(part_acc + s * HEAD_DIM + i * 16);
        }
        store16_f32(acc * norm, out + head * HEAD_DIM + i * 16);
    }
}

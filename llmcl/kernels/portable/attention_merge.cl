// Merges decode attention's partial online-softmax states over the key splits.
//
//   m = max_s m_s;   out = sum_s exp(m_s - m) acc_s / sum_s exp(m_s - m) l_s      s: the splits, and with HAS_SINKS the head's sink
//
// for each row in the step (step_rows.cl):
// part_ml  float [N_Q_HEADS][N_SPLITS][2] (m, l)    part_acc  float [N_Q_HEADS][N_SPLITS][HEAD_DIM]
// out      float [N_Q_HEADS][HEAD_DIM]               state    see STATE_*
// sinks    float [N_Q_HEADS], with HAS_SINKS: see online_softmax.cl
// Up to ONE_SPLIT_KEYS keys `out` is already complete and stays unchanged.
// Index space: groups (N_Q_HEADS, rows), local size LOCAL_SIZE; work-items share the columns, COLUMNS at a time.
// Build: N_Q_HEADS, N_SPLITS, HEAD_DIM, ONE_SPLIT_KEYS, COLUMNS (1 or 16), LOCAL_SIZE.
#if !defined(N_Q_HEADS) || !defined(N_SPLITS) || !defined(HEAD_DIM) || !defined(ONE_SPLIT_KEYS) || !defined(COLUMNS) || \
    !defined(LOCAL_SIZE) || !defined(STATE_POSITION)
#error "attention_merge.cl needs the build constants N_Q_HEADS, N_SPLITS, HEAD_DIM, ONE_SPLIT_KEYS, COLUMNS, LOCAL_SIZE and those of the step state"
#endif
#include "common/common.cl"
#include "common/online_softmax.cl"
#include "common/step_rows.cl"

#if COLUMNS == 16
typedef float16 columns_t;
#define load_columns load16_f32
#define store_columns store16_f32
#else
typedef float columns_t;
#define load_columns load1_f32
#define store_columns store1_f32
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void attention_merge(__global const float* part_ml, __global const float* part_acc, __global float* out,
                     __global const int* state SINKS_PARAM) {
    const int row = step_row(1);
    if (sequence_state(state, row)[STATE_POSITION] < ONE_SPLIT_KEYS) return;
    const int head = row * N_Q_HEADS + get_group_id(0);
    part_ml += head * N_SPLITS * 2;
    part_acc += (size_t)head * N_SPLITS * HEAD_DIM;

    const float sink = SINK(get_group_id(0));
    float m = sink;
#pragma unroll 32
    for (int s = 0; s < N_SPLITS; ++s) m = fmax(m, part_ml[2 * s]);
    float l = softmax_weight(sink, m);
#pragma unroll 32
    for (int s = 0; s < N_SPLITS; ++s) l += softmax_weight(part_ml[2 * s], m) * part_ml[2 * s + 1];
    const float norm = softmax_norm(l);
    for (int i = get_local_id(0) * COLUMNS; i < HEAD_DIM; i += LOCAL_SIZE * COLUMNS) {
        columns_t acc = 0;
#pragma unroll 32
        for (int s = 0; s < N_SPLITS; ++s) {
            const float weight = softmax_weight(part_ml[2 * s], m);
            const columns_t part = load_columns(part_acc + s * HEAD_DIM + i);
            // An empty split wrote no accumulator: the memory may hold NaN.
            acc += weight > 0.0f ? weight * part : (columns_t)(0.0f);
        }
        store_columns(acc * norm, out + head * HEAD_DIM + i);
    }
}

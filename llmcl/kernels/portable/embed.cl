// Embeds each token in a step, and computes its rotation.
//
//   x[t] = scale table[tokens[t]];   rope[t] = m_i (cos a_i, sin a_i),  a_i = float(position of t + offset) * f_i
//
// table      tiles of WEIGHT (tiles.cl), rows first_row .. first_row + n_rows - 1 of the vocabulary
// tokens     int [n], or one per sequence (step_rows.cl)     state      see STATE_*; offset: STATE_ROTARY_OFFSET
// rotation   float [2][HEAD_DIM/2]: f, m (rope_table.cl; [3] with ROPE_LONG or ROPE_GROWTH)
// x          float [n][hidden]
// rope       float [n][HEAD_DIM]: HEAD_DIM/2 cosines, then the sines
// last_seen  int [vocab] per sequence: each token's latest position, for the repetition penalty
//
// Index space: a work-group per token, local size LOCAL_SIZE. Build: WEIGHT, HEAD_DIM, LOCAL_SIZE.
// The host must have checked that 0 <= tokens[t] < vocab. The angle is rounded to float32, as in transformers.
#if !defined(WEIGHT) || !defined(HEAD_DIM) || !defined(LOCAL_SIZE) || !defined(STATE_POSITION)
#error "embed.cl needs the build constants WEIGHT, HEAD_DIM, LOCAL_SIZE and those of the step state"
#endif
#define K hidden  // an argument: models with different sizes share a program
#include "common/tiles.cl"
#include "common/rope_table.cl"
#include "common/step_rows.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void embed(__global const CAT(WEIGHT, _t)* table, __global const int* tokens, __global const int* state,
           __global const float* rotation, __global float* x, __global float* rope, __global int* last_seen,
           const int first_row, const int n_rows, const int hidden, const float scale, const int vocab) {
    const int t = get_group_id(0);
    const int token = row_token(tokens, state, t);
    const int row = token - first_row;
    if (row < 0 || row >= n_rows) return;
    const int position = row_position(state, t);

    table += row / 16 * TILE_SIZE;
    x += (size_t)t * hidden;
#if QUANTIZED
    for (int i = 4 * get_local_id(0); i < hidden; i += 4 * LOCAL_SIZE)
        vstore4(weights4_at(table, i, row % 16) * scale, 0, x + i);
#else
    for (int i = get_local_id(0); i < hidden; i += LOCAL_SIZE) x[i] = weight_at(table, i, row % 16) * scale;
#endif
    __global const int* sequence = sequence_state(state, t);
    write_rotation(rotation, position + sequence[STATE_ROTARY_OFFSET], sequence[STATE_TEXT_LENGTH], rope + t * HEAD_DIM);
#ifdef RECORDS
    last_seen += (size_t)sequence_of(state, t) * vocab;
#endif
    if (get_local_id(0) == 0) atomic_max(last_seen + token, position);
}

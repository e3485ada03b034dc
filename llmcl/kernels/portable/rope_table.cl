// An additional rotation for each token in a step, beside the table from `embed`: rope[t] = m_i (cos a_i, sin a_i),
// a_i = float(position of t) * f_i.
//
// state     see STATE_*                  rotation  float [2][HEAD_DIM/2]: f, m
// rope      float [n][HEAD_DIM]: HEAD_DIM/2 cosines, then the sines
//
// Index space: a work-group per token, local size LOCAL_SIZE. Build: HEAD_DIM, LOCAL_SIZE, STATE_POSITION.
#if !defined(HEAD_DIM) || !defined(LOCAL_SIZE) || !defined(STATE_POSITION)
#error "rope_table.cl needs the build constants HEAD_DIM, LOCAL_SIZE and those of the step state"
#endif
#include "common/rope_table.cl"
#include "common/step_rows.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void rope_table(__global const int* state, __global const float* rotation, __global float* rope) {
    const int t = get_group_id(0);
    write_rotation(rotation, row_position(state, t), 0, rope + t * HEAD_DIM);
}

// Rotations of tokens with a position on each of several axes, in place of those from `embed`:
//
//   rope[t] = m_i (cos a_i, sin a_i),  a_i = float(positions[t][axes[i]]) * f_i
//
// positions  int [n][N_AXES]             axes  int [HEAD_DIM/2]: the axis that rotates pair i
// rotation   float [2][HEAD_DIM/2]: f, m
// rope       float [n][HEAD_DIM]: HEAD_DIM/2 cosines, then the sines
//
// Index space: a work-group per token, local size LOCAL_SIZE. Build: HEAD_DIM, N_AXES, LOCAL_SIZE.
#if !defined(HEAD_DIM) || !defined(N_AXES) || !defined(LOCAL_SIZE)
#error "rope_axes.cl needs the build constants HEAD_DIM, N_AXES, LOCAL_SIZE"
#endif
#include "common/rope_table.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void rope_axes(__global const int* positions, __global const int* axes, __global const float* rotation,
               __global float* rope) {
    const int t = get_group_id(0);
    for (int i = get_local_id(0); i < HEAD_DIM / 2; i += LOCAL_SIZE)
        write_pair(rotation, i, (float)positions[t * N_AXES + axes[i]] * rotation[i], rope + t * HEAD_DIM);
}

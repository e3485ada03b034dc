// The rotation of a token: m_i (cos a_i, sin a_i), a_i = float(position) * f_i, shared by a group's LOCAL_SIZE work-items.
// rotation float [2][HEAD_DIM/2]: f, m. rope float [HEAD_DIM]: HEAD_DIM/2 cosines, then the sines.

inline void write_rotation(__global const float* rotation, const int position, __global float* rope) {
    for (int i = get_local_id(0); i < HEAD_DIM / 2; i += LOCAL_SIZE) {
        const float angle = (float)position * rotation[i], factor = rotation[HEAD_DIM / 2 + i];
        rope[i] = factor * cos(angle);
        rope[HEAD_DIM / 2 + i] = factor * sin(angle);
    }
}

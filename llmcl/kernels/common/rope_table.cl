// The rotation of a token: m_i (cos a_i, sin a_i), a_i = float(position) * f_i, shared by a group's LOCAL_SIZE work-items.
// rotation float [2][HEAD_DIM/2]: f, m. rope float [HEAD_DIM]: HEAD_DIM/2 cosines, then the sines.
// Frequencies may depend on the text's length L (see state[STATE_TEXT_LENGTH]; 0: the original length or less):
//   ROPE_LONG     rotation[2] has the frequencies if L > 0
//   ROPE_GROWTH   f_i (1 + ROPE_GROWTH n)^e_i, where rotation[2] has e, and n tokens of the text up to this one, or of the
//                 L tokens if more, exceed ROPE_ORIGINAL

inline float frequency_at(__global const float* rotation, const int i, const int position, const int text_length) {
#if defined(ROPE_LONG)
    return rotation[i + (text_length > 0 ? HEAD_DIM : 0)];
#elif defined(ROPE_GROWTH)
    const int beyond = max(max(text_length, position + 1) - ROPE_ORIGINAL, 0);
    return rotation[i] * pow(1.0f + ROPE_GROWTH * beyond, rotation[HEAD_DIM + i]);
#else
    return rotation[i];
#endif
}

inline void write_pair(__global const float* rotation, const int i, const float angle, __global float* rope) {
    const float factor = rotation[HEAD_DIM / 2 + i];
    rope[i] = factor * cos(angle);
    rope[HEAD_DIM / 2 + i] = factor * sin(angle);
}

inline void write_rotation(__global const float* rotation, const int position, const int text_length, __global float* rope) {
    for (int i = get_local_id(0); i < HEAD_DIM / 2; i += LOCAL_SIZE)
        write_pair(rotation, i, (float)position * frequency_at(rotation, i, position, text_length), rope);
}

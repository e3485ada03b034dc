// Rotation of a head in private or global memory: (x_i, x_{i+D/2}) -> (x_i c_i - x_{i+D/2} s_i, x_{i+D/2} c_i + x_i s_i).
// `rope` holds HEAD_DIM/2 cosines, then the sines. `i` is the index of the result element.

inline float rope_element(__global const float* x, __global const float* rope, const int i) {
    const int pair = i % (HEAD_DIM / 2);
    const float other = i < HEAD_DIM / 2 ? -x[i + HEAD_DIM / 2] : x[i - HEAD_DIM / 2];
    return x[i] * rope[pair] + other * rope[HEAD_DIM / 2 + pair];
}

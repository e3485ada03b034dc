// Stores an element of attention's output: float [rows][N_Q_HEADS HEAD_DIM]; with PACKED_OUT, for all rows, OUT
// [ceil(n/8)][N_Q_HEADS HEAD_DIM / 8][8][8], in the block layout of pack_activations.cl. Include after nvidia/ptx.cl.
#define OUT_SIZE (N_Q_HEADS * HEAD_DIM)

inline void store_attended(__global void* out, const int row, const int column, const float value) {
#if PACKED_OUT
    __global ushort* blocks = (__global ushort*)out + (size_t)(row / 8) * OUT_SIZE * 8;
    blocks[column / 8 * 64 + row % 8 * 8 + column % 8] = (ushort)CAT(narrow_, OUT)(value, 0.0f);
#else
    ((__global float*)out)[(size_t)row * OUT_SIZE + column] = value;
#endif
}

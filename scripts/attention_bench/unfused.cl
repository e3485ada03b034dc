// Attention in three kernels with the scores in global memory: S = scale Q K^T, softmax of its rows, O = P V.
// What llmcl's fused kernel is measured against. Not part of the engine.
//
// q, out  float [batch heads][LENGTH][HEAD_DIM]     v  KV [batch heads][LENGTH][HEAD_DIM]
// kt      KV [batch heads][HEAD_DIM][LENGTH]        KV is float, or half with HALF
// s          float [batch heads][LENGTH][LENGTH]
// A work-item of the two products computes ROWS rows of a column, so that what it reads of K and V serves ROWS rows;
// neighbouring work-items read neighbouring columns.
// Build: LENGTH (a multiple of ROWS), HEAD_DIM, ROWS, WIDTH (work-items of a softmax group, a power of two), HALF (0 or 1).
#if HALF
typedef half kv_t;
#define LOAD(i, p) vload_half(i, p)
#else
typedef float kv_t;
#define LOAD(i, p) (p)[i]
#endif

// Index space: (LENGTH, LENGTH / ROWS, batch heads).
__kernel void scores(__global const float* q, __global const kv_t* kt, __global float* s) {
    const int key = get_global_id(0), row = get_global_id(1) * ROWS;
    const size_t head = get_global_id(2);
    q += (head * LENGTH + row) * HEAD_DIM;
    kt += head * HEAD_DIM * LENGTH + key;
    float acc[ROWS];
    for (int r = 0; r < ROWS; ++r) acc[r] = 0.0f;
    for (int i = 0; i < HEAD_DIM; ++i) {
        const float value = LOAD((size_t)i * LENGTH, kt);
        for (int r = 0; r < ROWS; ++r) acc[r] += q[r * HEAD_DIM + i] * value;
    }
    for (int r = 0; r < ROWS; ++r) s[(head * LENGTH + row + r) * LENGTH + key] = acc[r] * rsqrt((float)HEAD_DIM);
}

// Index space: groups (LENGTH, batch heads) of WIDTH work-items.
__kernel __attribute__((reqd_work_group_size(WIDTH, 1, 1)))
void softmax(__global float* s) {
    __local float scratch[WIDTH];
    const int lid = get_local_id(0);
    s += ((size_t)get_group_id(1) * LENGTH + get_group_id(0)) * LENGTH;
    float top = -INFINITY, sum = 0.0f;
    for (int i = lid; i < LENGTH; i += WIDTH) top = fmax(top, s[i]);
    scratch[lid] = top;
    for (int width = WIDTH / 2; width > 0; width /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < width) scratch[lid] = fmax(scratch[lid], scratch[lid + width]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    top = scratch[0];
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = lid; i < LENGTH; i += WIDTH) {
        const float e = exp(s[i] - top);
        s[i] = e;
        sum += e;
    }
    scratch[lid] = sum;
    for (int width = WIDTH / 2; width > 0; width /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < width) scratch[lid] += scratch[lid + width];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const float norm = 1.0f / scratch[0];
    for (int i = lid; i < LENGTH; i += WIDTH) s[i] *= norm;
}

// Index space: (HEAD_DIM, LENGTH / ROWS, batch heads).
__kernel void weighted_values(__global const float* s, __global const kv_t* v, __global float* out) {
    const int column = get_global_id(0), row = get_global_id(1) * ROWS;
    const size_t head = get_global_id(2);
    s += (head * LENGTH + row) * LENGTH;
    v += head * LENGTH * HEAD_DIM + column;
    float acc[ROWS];
    for (int r = 0; r < ROWS; ++r) acc[r] = 0.0f;
    for (int key = 0; key < LENGTH; ++key) {
        const float value = LOAD((size_t)key * HEAD_DIM, v);
        for (int r = 0; r < ROWS; ++r) acc[r] += s[(size_t)r * LENGTH + key] * value;
    }
    for (int r = 0; r < ROWS; ++r) out[(head * LENGTH + row + r) * HEAD_DIM + column] = acc[r];
}

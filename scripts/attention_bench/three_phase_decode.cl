// Decode attention in three phases: the kernel that llmcl's own is measured against. Not part of the engine.
//
//   (1) each work-item scores every 64th key, and the group takes the maximum;
//   (2) the scores are computed again for the sum of their exponentials;
//   (3) each work-item owns output columns and computes the scores again for every key.
//
// q float [N_Q_HEADS][HEAD_DIM], rotated     k, v float [kv_len][N_KV_HEADS][HEAD_DIM]     out float [N_Q_HEADS][HEAD_DIM]
// Index space: one work-group of 64 work-items a query head. Build: N_Q_HEADS, N_KV_HEADS, HEAD_DIM.
#define WIDTH 64

float score(__global const float* q, __global const float* k, const int key) {
    float sum = 0.0f;
    for (int i = 0; i < HEAD_DIM; ++i) sum += q[i] * k[(size_t)key * N_KV_HEADS * HEAD_DIM + i];
    return sum * rsqrt((float)HEAD_DIM);
}

__kernel __attribute__((reqd_work_group_size(WIDTH, 1, 1)))
void three_phase_decode(__global const float* q, __global const float* k, __global const float* v, __global float* out,
                        const int kv_len) {
    __local float scratch[WIDTH];
    const int head = get_group_id(0), lid = get_local_id(0);
    const int kv_head = head / (N_Q_HEADS / N_KV_HEADS);
    q += head * HEAD_DIM;
    k += kv_head * HEAD_DIM;
    v += kv_head * HEAD_DIM;

    float top = -INFINITY;
    for (int key = lid; key < kv_len; key += WIDTH) top = fmax(top, score(q, k, key));
    scratch[lid] = top;
    for (int width = WIDTH / 2; width > 0; width /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < width) scratch[lid] = fmax(scratch[lid], scratch[lid + width]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    top = scratch[0];
    barrier(CLK_LOCAL_MEM_FENCE);

    float sum = 0.0f;
    for (int key = lid; key < kv_len; key += WIDTH) sum += exp(score(q, k, key) - top);
    scratch[lid] = sum;
    for (int width = WIDTH / 2; width > 0; width /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < width) scratch[lid] += scratch[lid + width];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    sum = scratch[0];

    for (int column = lid; column < HEAD_DIM; column += WIDTH) {
        float acc = 0.0f;
        for (int key = 0; key < kv_len; ++key)
            acc += exp(score(q, k, key) - top) * v[(size_t)key * N_KV_HEADS * HEAD_DIM + column];
        out[head * HEAD_DIM + column] = acc / sum;
    }
}

// Appends a step's tokens to the latent attention cache, and rotates their queries.
//
//   row = [ latent / sqrt(mean(latent^2) + EPS) * norm | rotate(key) ];  rotates the last ROPE elements in each query head
//   rotate: (a_p, b_p) -> (a_p c_p - b_p s_p, b_p c_p + a_p s_p), all first results, then all second results (Su et al., "RoFormer");
//   pair p is stored as 2 p, 2 p + 1 with INTERLEAVED, else as p, p + ROPE / 2    (DeepSeek-AI, "DeepSeek-V2", 2024, 2.1)
//
// latents  float [n][HEAD_DIM]: RANK numbers, then the key, shared by all heads       norm  float [RANK]
// queries  float [n][N_Q_HEADS][QUERY], rotated in place
// rope     float [n][HEAD_DIM]: cosines from 0 on, sines from HEAD_DIM / 2 on (from `embed`)
// cache    KV, rows in latent_row.cl's layout       state  see STATE_*; for several sequences, step_rows.cl
//
// Index space: a work-group per token, local size LOCAL_SIZE; work-items share the row's numbers, then the heads.
// Build: KV, HEAD_DIM, RANK (multiples of 16), CAPACITY, N_Q_HEADS, QUERY, ROPE (HEAD_DIM - RANK, even), INTERLEAVED, EPS, LOCAL_SIZE (a
// power of two); for pages see kv_address.cl. Local memory: 4 LOCAL_SIZE bytes.
// The host must have checked position + n <= CAPACITY.
#if !defined(N_Q_HEADS) || !defined(QUERY) || !defined(ROPE) || !defined(INTERLEAVED) || !defined(EPS) || !defined(LOCAL_SIZE) || \
    !defined(CAPACITY) || !defined(STATE_POSITION)
#error "latent_append.cl needs N_Q_HEADS, QUERY, ROPE, INTERLEAVED, EPS, LOCAL_SIZE, CAPACITY and the constants of the step state"
#endif
#include "common/latent_row.cl"
#include "common/reduce.cl"
#include "common/step_rows.cl"

// Element i of the rotated x.
inline float rotated_at(__global const float* x, __global const float* rope, const int i) {
    const int pair = i % (ROPE / 2);
    const float a = x[INTERLEAVED ? 2 * pair : pair], b = x[INTERLEAVED ? 2 * pair + 1 : pair + ROPE / 2];
    const float c = rope[pair], s = rope[HEAD_DIM / 2 + pair];
    return i < ROPE / 2 ? a * c - b * s : b * c + a * s;
}

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void latent_append(__global const float* latents, __global const float* norm, __global float* queries,
                   __global const float* rope, __global const int* state, __global kv_t* cache) {
    LOCAL_SCRATCH(float, scratch);
    const int t = get_group_id(0), lid = get_local_id(0), position = row_position(state, t);
    const int row = kv_row(sequence_state(state, t), position);
    latents += (size_t)t * HEAD_DIM;
    rope += (size_t)t * HEAD_DIM;
    queries += (size_t)t * N_Q_HEADS * QUERY + QUERY - ROPE;

    float square = 0.0f;
    for (int i = lid; i < RANK; i += LOCAL_SIZE) square += latents[i] * latents[i];
    const float sum = reduce_sum(square, scratch, lid);
    const float scale = 1.0f / sqrt(NO_OVERFLOW(sum) / RANK + EPS);
    for (int run = lid; run < HEAD_DIM / KV_RUN; run += LOCAL_SIZE) {
        float x[KV_RUN];
        for (int j = 0; j < KV_RUN; ++j) {
            const int i = run * KV_RUN + j;
            x[j] = i < RANK ? latents[i] * scale * norm[i] : rotated_at(latents + RANK, rope, i - RANK);
        }
        store_value(KV_TILES_AT(cache, row), row % 16, run * KV_RUN, x);
    }
    for (int h = lid; h < N_Q_HEADS; h += LOCAL_SIZE) {
        float x[ROPE];
        for (int i = 0; i < ROPE; ++i) x[i] = rotated_at(queries + h * QUERY, rope, i);
        for (int i = 0; i < ROPE; ++i) queries[h * QUERY + i] = x[i];
    }
}

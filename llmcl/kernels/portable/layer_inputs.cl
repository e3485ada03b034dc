// Computes each layer's per-token input beside the residual stream, in place.
//
//   x[t][l] = FACTOR (x[t][l] / sqrt(mean(x[t][l]^2) + EPS) norm + X_SCALE table[tokens[t]][l])
//
// x      float [n][N_LAYERS][SIZE], a projection of the token's embedding
// norm   float [SIZE]
// table  tiles of WEIGHT (tiles.cl), rows first_row .. first_row + n_rows - 1 in the vocabulary; tokens in other rows are left
//        to other launches
// tokens int [n], or one per sequence (step_rows.cl)       state      see STATE_*
//
// Index space: groups (N_LAYERS, n), local size LOCAL_SIZE. Build: WEIGHT, N_LAYERS, SIZE (a multiple of 16), EPS, X_SCALE, FACTOR,
// LOCAL_SIZE (a power of two), step state constants. Local memory: 4 LOCAL_SIZE bytes.
#if !defined(WEIGHT) || !defined(N_LAYERS) || !defined(SIZE) || !defined(EPS) || !defined(X_SCALE) || !defined(FACTOR) || \
    !defined(LOCAL_SIZE) || !defined(STATE_POSITION)
#error "layer_inputs.cl needs the build constants WEIGHT, N_LAYERS, SIZE, EPS, X_SCALE, FACTOR, LOCAL_SIZE and those of the step state"
#endif
#define K (N_LAYERS * SIZE)
#include "common/tiles.cl"
#include "common/reduce.cl"
#include "common/step_rows.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void layer_inputs(__global const CAT(WEIGHT, _t)* table, __global const int* tokens, __global const int* state,
                  __global const float* norm, __global float* x, const int first_row, const int n_rows) {
    LOCAL_SCRATCH(float, scratch);
    const int lid = get_local_id(0), first = get_group_id(0) * SIZE, t = get_group_id(1);
    const int row = row_token(tokens, state, t) - first_row;
    if (row < 0 || row >= n_rows) return;
    table += row / 16 * TILE_SIZE;
    x += (size_t)t * K + first;

    float squares = 0.0f;
    // Each work-item reads the values it writes: reduce_sum's barriers only order local memory.
    for (int i = 4 * lid; i < SIZE; i += 4 * LOCAL_SIZE)
        for (int j = 0; j < 4; ++j) squares += x[i + j] * x[i + j];
    const float sum = reduce_sum(squares, scratch, lid);
    const float scale = 1.0f / sqrt(NO_OVERFLOW(sum) / SIZE + EPS);
    for (int i = 4 * lid; i < SIZE; i += 4 * LOCAL_SIZE) {
        float embedded[4];
#if QUANTIZED
        vstore4(weights4_at(table, first + i, row % 16), 0, embedded);
#else
        for (int j = 0; j < 4; ++j) embedded[j] = weight_at(table, first + i + j, row % 16);
#endif
        for (int j = 0; j < 4; ++j) x[i + j] = FACTOR * (x[i + j] * scale * norm[i + j] + X_SCALE * embedded[j]);
    }
}

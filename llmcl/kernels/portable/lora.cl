// LoRA adapters beside a product: out += B (scale A norm(x)), for the adapters that each row's sequence has chosen.
// (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021)
//
//   lora_down  low[t][j] = scale[t][adapter of j] / rms(x[t]) * sum_i A[j][i] norm[i] x[t][i]     (without NORM: A x)
//   lora_up    out[t][c] += sum_j B[j][c] low[t][j], j over the chosen adapters' rows for the segment of c
//
// A product's weight has n_segments segments, the tensors that are stacked in it (q, k, v). An adapter of rank r has r rows of A for each
// segment, one segment after the other, and r rows of B, each with all columns of `out`. r is a multiple of 4.
//
//   adapter     0                   1                     ...
//   A, low      r0 q, r0 k, r0 v,   r1 q, r1 k, r1 v,     ...   `total` rows
//   B           r0 rows of q k v,   r1 rows of q k v,     ...
//
// With EPILOGUE_SWIGLU, lora_up computes out[t] = GATE(gate + its sum) (up + its sum), with alternating 16-column tiles of gate and up
// in `base`. Otherwise base is out.
//
// x      float [n][k], k a multiple of 16            norm     float [k]
// a, b   WEIGHT [total][k], [ranks][columns]         low      float [n][total]
// owners   int [total / 4]: the adapter of 4 rows of A
// segments int [columns / 16]: the segment of 16 columns
// table    int [n_adapters][3]: first row of A, first row of B, rank
// scales   float [sequences][n_adapters]: 0 for an adapter that is not chosen
// Index space: lora_down (ceil(total / (4 run)), n), lora_up (ceil(units / (run LOCAL_SIZE)), n), units of 16 columns or pairs of them;
// local size LOCAL_SIZE.
// Build: WEIGHT, NORM, EPS, EPILOGUE (EPILOGUE_ADD or EPILOGUE_SWIGLU, with GATE), LOCAL_SIZE (a power of two), and step_rows.cl's.
// Local memory: lora_down 4 LOCAL_SIZE bytes.
#if !defined(WEIGHT) || !defined(NORM) || !defined(EPS) || !defined(EPILOGUE) || !defined(LOCAL_SIZE)
#error "lora.cl needs the build constants WEIGHT, NORM, EPS, EPILOGUE, LOCAL_SIZE"
#endif
#include "common/common.cl"
#include "common/reduce.cl"
#include "common/step_rows.cl"
#define LOAD16 CAT(load16_, WEIGHT)
#define weight_t CAT(WEIGHT, _t)

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void lora_down(__global const weight_t* a, __global const float* x, __global const float* norm, __global float* low,
               __global const int* owners, __global const float* scales, __global const int* state, const int k, const int total,
               const int n_adapters, const int run) {
    LOCAL_SCRATCH(float, scratch);
    const int lid = get_local_id(0), row = get_group_id(1);
    x += (size_t)row * k;
    low += (size_t)row * total;
    scales += sequence_of(state, row) * n_adapters;
    const int end = min(total, ((int)get_group_id(0) + 1) * run * 4);
    for (int j = (int)get_group_id(0) * run * 4; j < end; j += 4) {
        const float scale = scales[owners[j / 4]];
        if (scale == 0.0f) continue;
        float16 sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0, squares = 0;
        __global const weight_t* rows = a + (size_t)j * k;
        for (int i = lid * 16; i < k; i += LOCAL_SIZE * 16) {
            float16 v = load16_f32(x + i);
#if NORM
            squares += v * v;
            v *= load16_f32(norm + i);
#endif
            sum0 += v * LOAD16(rows + i);
            sum1 += v * LOAD16(rows + k + i);
            sum2 += v * LOAD16(rows + 2 * k + i);
            sum3 += v * LOAD16(rows + 3 * k + i);
        }
        float factor = scale;
#if NORM
        factor /= sqrt(NO_OVERFLOW(reduce_sum(sum16(squares), scratch, lid)) / k + EPS);
#endif
        const float s0 = reduce_sum(sum16(sum0), scratch, lid), s1 = reduce_sum(sum16(sum1), scratch, lid);
        const float s2 = reduce_sum(sum16(sum2), scratch, lid), s3 = reduce_sum(sum16(sum3), scratch, lid);
        if (lid == 0) {
            low[j] = factor * s0;
            low[j + 1] = factor * s1;
            low[j + 2] = factor * s2;
            low[j + 3] = factor * s3;
        }
    }
}

// The change of 16 columns from `column` on.
inline float16 change_of(__global const weight_t* b, __global const float* low, __global const int* segments, __global const int* table,
                         __global const float* scales, const int n_adapters, const int columns, const int column) {
    float16 sum = 0;
    const int segment = segments[column / 16];
    for (int adapter = 0; adapter < n_adapters; ++adapter) {
        if (scales[adapter] == 0.0f) continue;
        const int rank = table[3 * adapter + 2];
        __global const float* of_segment = low + table[3 * adapter] + segment * rank;
        __global const weight_t* rows = b + (size_t)table[3 * adapter + 1] * columns + column;
        for (int j = 0; j < rank; ++j) sum += of_segment[j] * LOAD16(rows + (size_t)j * columns);
    }
    return sum;
}

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void lora_up(__global const weight_t* b, __global const float* low, __global const float* base, __global float* out,
             __global const int* segments, __global const int* table, __global const float* scales, __global const int* state,
             const int columns, const int total, const int n_adapters, const int run) {
    const int row = get_group_id(1);
    low += (size_t)row * total;
    scales += sequence_of(state, row) * n_adapters;
    base += (size_t)row * columns;
#if EPILOGUE == EPILOGUE_SWIGLU
    out += (size_t)row * (columns / 2);
    const int width = 32;
#else
    out += (size_t)row * columns;
    const int width = 16;
#endif
    const int first = (int)get_group_id(0) * run * LOCAL_SIZE;
    for (int unit = first + get_local_id(0); unit < first + run * LOCAL_SIZE; unit += LOCAL_SIZE) {
        const int column = unit * width;
        if (column >= columns) break;
#if EPILOGUE == EPILOGUE_SWIGLU
        const float16 gate = load16_f32(base + column) + change_of(b, low, segments, table, scales, n_adapters, columns, column);
        const float16 up = load16_f32(base + column + 16) + change_of(b, low, segments, table, scales, n_adapters, columns, column + 16);
        store16_f32(GATE_VALUE(gate, exp16) * up, out + column / 2);
#else
        store16_f32(load16_f32(base + column) + change_of(b, low, segments, table, scales, n_adapters, columns, column), out + column);
#endif
    }
}

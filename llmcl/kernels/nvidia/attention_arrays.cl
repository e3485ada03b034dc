// Where prefill finds queries, keys and values, and how it writes its output: in the cache's layout, or with ARRAYS in arrays
// [batch][heads][rows][HEAD_DIM] as they lie in memory.
//
// Then `state` has from slot STRIDES on how many values apart batches, heads and rows of the queries are, then of the keys, then
// of the values: rows begin at multiples of 16 bytes; CAPACITY is how many rows a batch of keys (a page of them) has, and
// ARRAY_BLOCKS, an expression, how many batches or pages there are. Out is OUT (f32, f16 or bf16) [batch][N_Q_HEADS][n][HEAD_DIM].
#include "common/query_address.cl"

#define QUERIES 0
#define KEYS 3
#define VALUES 6
#if ARRAYS
#ifndef STRIDES
#error "arrays need the build constant STRIDES"
#endif
#define QUERY_T CAT(KV, _t)
#define ROW_STRIDE(of) (state[STRIDES + (of) + 2])
#define first_row(of, batch, head) ((long)(batch) * state[STRIDES + (of)] + (long)(head) * state[STRIDES + (of) + 1])
#else
#define QUERY_T float
#define ROW_STRIDE(of) ((of) == QUERIES ? (Q_STRIDE) : HEAD_DIM)
#define first_row(of, batch, head) (((long)(batch) * N_KV_HEADS + (head)) * CAPACITY * HEAD_DIM)  // of KEYS or VALUES
#endif

// Two neighbouring values of the output.
inline void store_pair_f32(__global f32_t* y, const float a, const float b) { *(__global float2*)y = (float2)(a, b); }
inline void store_pair_f16(__global f16_t* y, const float a, const float b) { *(__global uint*)y = narrow_f16(a, b); }
inline void store_pair_bf16(__global bf16_t* y, const float a, const float b) { *(__global uint*)y = narrow_bf16(a, b); }

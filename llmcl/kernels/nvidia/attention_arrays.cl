// Addresses of queries, keys and values in prefill, and writing the output: in the cache's layout, or with ARRAYS in arrays
// [batch][heads][rows][HEAD_DIM], read in place.
//
// With ARRAYS, `state` holds strides from slot STRIDES on: the distances in values between batches, heads and rows for queries,
// then for keys, then for values. Rows begin at multiples of 16 bytes. CAPACITY is the row count per batch of keys (or page), and
// ARRAY_BLOCKS, an expression, the number of batches or pages. The output is OUT (f32, f16, bf16) [batch][N_Q_HEADS][n][HEAD_DIM].
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
#define first_row(of, batch, head) (((long)(batch) * N_KV_HEADS + (head)) * CAPACITY * HEAD_DIM)  // in KEYS or VALUES
#endif

// Stores two neighbouring output values.
inline void store_pair_f32(__global f32_t* y, const float a, const float b) { *(__global float2*)y = (float2)(a, b); }
inline void store_pair_f16(__global f16_t* y, const float a, const float b) { *(__global uint*)y = narrow_f16(a, b); }
inline void store_pair_bf16(__global bf16_t* y, const float a, const float b) { *(__global uint*)y = narrow_bf16(a, b); }

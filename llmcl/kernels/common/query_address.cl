// Addresses of a query and its output in prefill: tokens first in a model's step, heads first in attention on arrays.
//
//   HEADS_FIRST 0: queries [batch][n][stride], head h at h HEAD_DIM;  out [batch][n][heads][HEAD_DIM]
//   HEADS_FIRST 1: queries [batch][heads][n][stride];                 out [batch][heads][n][WIDTH]
// WIDTH: columns of the arrays, HEAD_DIM unless a kernel that reads arrays in place fills up rows with zeros itself.
#if !defined(HEADS_FIRST) || !defined(HEAD_DIM)
#error "query_address.cl needs the build constants HEADS_FIRST, HEAD_DIM"
#endif
#ifndef WIDTH
#define WIDTH HEAD_DIM
#endif

// The first query of a head; further queries follow at distances of `stride`.
inline size_t first_query(const int batch, const int head, const int n, const int heads, const int stride) {
#if HEADS_FIRST
    return ((size_t)batch * heads + head) * n * stride;
#else
    return (size_t)batch * n * stride + head * HEAD_DIM;
#endif
}

inline size_t output_of(const int batch, const int head, const int t, const int n, const int heads) {
#if HEADS_FIRST
    return (((size_t)batch * heads + head) * n + t) * WIDTH;
#else
    return (((size_t)batch * n + t) * heads + head) * HEAD_DIM;
#endif
}

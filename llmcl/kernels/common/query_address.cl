// Where prefill finds a query and puts its output: tokens first in a model's step, heads first in attention on arrays.
//
//   HEADS_FIRST 0: queries [batch][n][Q_STRIDE], head h at h HEAD_DIM;  out [batch][n][N_Q_HEADS][HEAD_DIM]
//   HEADS_FIRST 1: queries [batch][N_Q_HEADS][n][Q_STRIDE];             out [batch][N_Q_HEADS][n][HEAD_DIM]
#if !defined(HEADS_FIRST) || !defined(Q_STRIDE) || !defined(N_Q_HEADS) || !defined(HEAD_DIM)
#error "query_address.cl needs the build constants HEADS_FIRST, Q_STRIDE, N_Q_HEADS, HEAD_DIM"
#endif

// The first query of a head; the others follow at distances of Q_STRIDE.
inline size_t first_query(const int batch, const int head, const int n) {
#if HEADS_FIRST
    return ((size_t)batch * N_Q_HEADS + head) * n * Q_STRIDE;
#else
    return (size_t)batch * n * Q_STRIDE + head * HEAD_DIM;
#endif
}

inline size_t output_of(const int batch, const int head, const int t, const int n) {
#if HEADS_FIRST
    return (((size_t)batch * N_Q_HEADS + head) * n + t) * HEAD_DIM;
#else
    return (((size_t)batch * n + t) * N_Q_HEADS + head) * HEAD_DIM;
#endif
}

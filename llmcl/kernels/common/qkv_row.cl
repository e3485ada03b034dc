// The heads of a token's row of queries, keys and values, as a projection leaves them.
//
// With SHARED_KV a layer reads keys and values that another has appended: rows of queries alone, and no append.
#if SHARED_KV
#define QKV_HEADS N_Q_HEADS
#else
#define QKV_HEADS (N_Q_HEADS + 2 * N_KV_HEADS)
#endif

// The heads in a token's row of queries, keys and values, as a projection leaves the row.
//
// With SHARED_KV a layer reads keys and values appended by another layer: rows hold queries only, and nothing is appended.
#if SHARED_KV
#define QKV_HEADS N_Q_HEADS
#else
#define QKV_HEADS (N_Q_HEADS + 2 * N_KV_HEADS)
#endif

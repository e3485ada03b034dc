// A token's row of queries, keys and values for the delta rule, and for Mamba-2's scan (without CORRECTS; see portable/delta_rule.cl).
//
//   CORRECTS: q of N_K heads, k, v of N_V heads      else: v (x), k (B), q (C)
//
// Build: CORRECTS, N_K, N_V, D_K, D_V.
#if !defined(CORRECTS) || !defined(N_K) || !defined(N_V) || !defined(D_K) || !defined(D_V)
#error "delta_row.cl needs the build constants CORRECTS, N_K, N_V, D_K, D_V"
#endif
#define CHANNELS (2 * N_K * D_K + N_V * D_V)
#if CORRECTS
#define FIRST_Q 0
#define FIRST_K (N_K * D_K)
#define FIRST_V (2 * N_K * D_K)
#define SCALARS_PARAM
#else
#define FIRST_V 0
#define FIRST_K (N_V * D_V)
#define FIRST_Q (FIRST_K + N_K * D_K)
#define SCALARS_PARAM , __global const float* scalars
#define SKIP(v) scalars[2 * N_V + (v)]
#endif

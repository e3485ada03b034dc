// What a user's functions make of a score, and which keys a query sees: the hooks of every attention kernel.
//
//   float score_mod(float score, int b, int h, int q_idx, int kv_idx)      int mask_mod(int b, int h, int q_idx, int kv_idx)
//
// Source: Dong et al., "Flex Attention" (2024). The host traces Python functions into these two and puts them in front of
// the program, with HAS_SCORE_MOD or HAS_MASK_MOD; MOD_PARAMS and MOD_ARGS hand through the arrays that they look up.
#ifndef HAS_SCORE_MOD
#define HAS_SCORE_MOD 0
#endif
#ifndef HAS_MASK_MOD
#define HAS_MASK_MOD 0
#endif
#ifndef MOD_PARAMS
#define MOD_PARAMS
#define MOD_ARGS
#endif

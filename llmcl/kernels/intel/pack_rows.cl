// Activations for Intel's matrix units: x rounded to nearest even, in the weight's 16 bits, in blocks of 8 tokens by 16 columns.
//
// x  float [n][K]     to  WEIGHT [ceil(n/8)][K/16][8][16]; values beyond float16 become float16's largest; tokens from n on repeat the last
// Index space: (ceil(K / 16 / LOCAL_SIZE), 8 ceil(n/8)) groups, LOCAL_SIZE work-items each; a work-item packs 16 columns of a token.
// Build: WEIGHT (f16 or bf16), K (a multiple of 16), LOCAL_SIZE.
#if !defined(WEIGHT) || !defined(K) || !defined(LOCAL_SIZE) || !defined(STATE_N_TOKENS)
#error "intel/pack_rows.cl needs the build constants WEIGHT, K, LOCAL_SIZE and those of the step state"
#endif
#include "common/common.cl"

inline ushort narrow1_bf16(const float v) { return round_bf16(v); }
inline ushort narrow1_f16(const float v) {
    ushort bits;
    vstore_half_rte(isnan(v) ? v : clamp(v, -65504.0f, 65504.0f), 0, (half*)&bits);
    return bits;
}

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void pack_rows(__global const float* x, __global ushort* to, __global const int* state) {
    const int block = get_global_id(0), token = get_group_id(1);
    if (block >= K / 16) return;
    x += (size_t)min(token, state[STATE_N_TOKENS] - 1) * K + 16 * block;
    to += ((size_t)(token / 8) * (K / 16) + block) * 128 + token % 8 * 16;
    for (int i = 0; i < 16; ++i) to[i] = CAT(narrow1_, WEIGHT)(x[i]);
}

// Packs activations for a product on NVIDIA's matrix units: to[t] = x[t] rounded to nearest even, in the weight's 16 bits.
//
// x   float [n][K]      to  values beyond float16 become float16's largest
//   BLOCKS 0: WEIGHT [n][K]
//   BLOCKS 1: WEIGHT [ceil(n/8)][K/8][8][8]: blocks of 8 tokens x 8 columns; tokens from n on repeat the last
// Index space: a work-item per 8 values; groups (ceil(K / 8 / LOCAL_SIZE), n), with BLOCKS (ceil(K / LOCAL_SIZE), ceil(n SLOTS / 8)).
// Build: WEIGHT (f16 or bf16), K (a multiple of 8), BLOCKS, LOCAL_SIZE; with BLOCKS also SLOTS (1), rows per token.
#if !defined(WEIGHT) || !defined(K) || !defined(BLOCKS) || !defined(LOCAL_SIZE) || !defined(STATE_N_TOKENS)
#error "nvidia/pack_activations.cl needs the build constants WEIGHT, K, BLOCKS, LOCAL_SIZE and those of the step state"
#endif
#include "common/common.cl"
#include "nvidia/ptx.cl"
#ifndef SLOTS
#define SLOTS 1
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void pack_activations(__global const float* x, __global uint4* to, __global const int* state) {
    const int piece = get_global_id(0);
#if BLOCKS
    if (piece >= K) return;
    const int row = min((int)get_group_id(1) * 8 + piece % 8, state[STATE_N_TOKENS] * SLOTS - 1), column = piece / 8;
    to += (size_t)get_group_id(1) * K;
#else
    if (piece >= K / 8) return;
    const int row = get_group_id(1), column = piece;
    to += (size_t)row * (K / 8);
#endif
    const float8 v = vload8(column, x + (size_t)row * K);
    to[piece] = (uint4)(CAT(narrow_, WEIGHT)(v.s0, v.s1), CAT(narrow_, WEIGHT)(v.s2, v.s3), CAT(narrow_, WEIGHT)(v.s4, v.s5),
                        CAT(narrow_, WEIGHT)(v.s6, v.s7));
}

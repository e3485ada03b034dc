// Activations for a product on NVIDIA GPUs' matrix units: to[t] = x[t] rounded to nearest even, in the weight's 16 bits.
//
// x   float [n][K]      to  WEIGHT [n][K]; values beyond float16 become its largest
// Index space: one work-item 8 columns; groups (ceil(K / 8 / LOCAL_SIZE), n).
// Build: WEIGHT (f16 or bf16), K (a multiple of 8), LOCAL_SIZE.
#if !defined(WEIGHT) || !defined(K) || !defined(LOCAL_SIZE)
#error "nvidia/narrow_rows.cl needs the build constants WEIGHT, K, LOCAL_SIZE"
#endif
#include "common.cl"
#include "nvidia/ptx.cl"

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void narrow_rows(__global const float* x, __global uint4* to) {
    const int piece = get_global_id(0);
    if (piece >= K / 8) return;
    const size_t at = (size_t)get_group_id(1) * (K / 8) + piece;
    const float8 v = vload8(at, x);
    to[at] = (uint4)(CAT(narrow_, WEIGHT)(v.s0, v.s1), CAT(narrow_, WEIGHT)(v.s2, v.s3), CAT(narrow_, WEIGHT)(v.s4, v.s5),
                     CAT(narrow_, WEIGHT)(v.s6, v.s7));
}

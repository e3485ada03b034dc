// shares[t][s] *= scales[ids[t][s]], in place: scales each expert's output weight.
//
// shares  float [n][TOP_K]      ids  int [n][TOP_K]      scales  float [experts]
// Index space: a work-group per token, local size LOCAL_SIZE. Build: TOP_K, LOCAL_SIZE.
#if !defined(TOP_K) || !defined(LOCAL_SIZE)
#error "scale_shares.cl needs the build constants TOP_K, LOCAL_SIZE"
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void scale_shares(__global float* shares, __global const int* ids, __global const float* scales) {
    const size_t first = (size_t)get_group_id(0) * TOP_K;
    for (int s = get_local_id(0); s < TOP_K; s += LOCAL_SIZE) shares[first + s] *= scales[ids[first + s]];
}

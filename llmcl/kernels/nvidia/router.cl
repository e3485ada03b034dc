// A router's product in a persistent kernel, for float32 router weights beside another type: logits = W norm(x), W float32 tiles
// [HIDDEN][16]. A work-group takes 16 rows, a warp its received columns in runs of 16, a lane four rows in two columns of each run.
//
//     lane:        0     1     2     3     4    ...    31        and the same 8 columns further on
//     column:      0     0     0     0     1            7
//     rows:       0-3   4-7   8-11 12-15  0-3        12-15
//
// Build: HIDDEN, WARPS, EPS, constants of nvidia/layer_products.cl. Local memory: half of a product's sums.
#define ROUTER_RUNS ((HIDDEN / 16 + WARPS - 1) / WARPS)

// Computes rows 16 unit .. 16 unit + 15, of `rows`. columns: from `receive` for x; x, norm: if columns are not float32. sums: the
// products' sums; `parity` selects the free half.
inline void router_product(__global const float* weight, const int unit, const int rows, __local const float* columns,
                           __global const float* x, __global const float* norm, const bool normed, __local float* sums, int* parity,
                           const target* to) {
    const int item = this_item(), lane = item % WARP, warp = item / WARP;
    weight += (size_t)unit * HIDDEN * 16;
#if !FLOAT_COLUMNS
    barrier(CLK_LOCAL_MEM_FENCE);  // the columns received by other warps have arrived, too
#endif
    float4 acc = 0.0f;
#pragma unroll 4
    for (int step = 0; step < ROUTER_RUNS; ++step) {
        const int run = step * WARPS + warp;
        if (run >= HIDDEN / 16) break;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int column = run * 16 + h * 8 + lane / 4;
            const float4 w = as_float4(load16_words(weight + column * 16 + lane % 4 * 4));
#if !FLOAT_COLUMNS
            acc += w * (value_of(as_uint(load_shared_float(x + column))) * (normed ? norm[column] : 1.0f));
#else
            acc += w * columns[step * 16 + h * 8 + lane / 4];
#endif
        }
    }
    for (int other = 4; other < WARP; other *= 2)
        acc += (float4)(shuffle_xor(acc.x, other), shuffle_xor(acc.y, other), shuffle_xor(acc.z, other), shuffle_xor(acc.w, other));
    __local float* here = sums + *parity * (PRODUCT_SQUARES_AT / 2);  // [WARPS][16]
    if (lane < 4) vstore4(acc, 0, here + warp * 16 + lane * 4);
    barrier(CLK_LOCAL_MEM_FENCE);
    const int row = unit * 16 + lane;
    if (warp == 0 && lane < 16 && row < rows) {
        float y = 0.0f, scale = 1.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) y += here[i * 16 + lane];
        if (normed) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) sum += sums[PRODUCT_SQUARES_AT + i];
            scale = rsqrt(NO_OVERFLOW(sum) / HIDDEN + EPS);
        }
        deliver(to, row, 0, y * scale, to->bias, to->bias ? to->bias[row] : 0.0f);
    }
    warp_sync();  // no lane waits for values that its own warp has yet to send
    *parity ^= 1;
}

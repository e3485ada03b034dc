// Common to products of all quantised types: a warp's columns of the token's x, and the output rows. Included in the middle of
// nvidia/product_quantized.cl.

#if DOT
// Rounds to the nearest integers, 8 bits each; an integer is the lower bits of a float.
ALWAYS_INLINE uint pack4(const float4 v) {
    const uint4 u = as_uint4(v + 0x1.8p23f) & 0xffu;
    return u.x | u.y << 8 | u.z << 16 | u.w << 24;
}
ALWAYS_INLINE float largest4(const float4 v) { return fmax(fmax(fabs(v.x), fabs(v.y)), fmax(fabs(v.z), fabs(v.w))); }
#endif

// The columns received by a work-item: a warp takes the groups of two steps at once, 4 lanes per group, two float4 values per lane.
ALWAYS_INLINE places places_of(const int columns) {
    const int item = this_item(), lane = item % WARP, groups = columns / 32, most = GROUPS_OF(columns) / 8;
    const int group = 4 * (item / WARP) + lane / 4 % 4 + lane / 16 * STEP_GROUPS;
    const int count = group < groups ? (groups - group + 2 * STEP_GROUPS - 1) / (2 * STEP_GROUPS) : 0;
    const places p = {32 * group + lane % 4 * 4, 2 * STEP_GROUPS * 32, 16, 2 * count, 2 * most, item};
    return p;
}

// Stores columns of the warp's group g for the products: 4 j .. 4 j + 3, and the same 16 further on. Called by all lanes in a warp.
ALWAYS_INLINE void put_columns(__local float* columns, const int g, const int j, const float4 a, const float4 b) {
#if DOT
    float largest = fmax(largest4(a), largest4(b));
    largest = fmax(largest, shuffle_xor(largest, 1));
    largest = fmax(largest, shuffle_xor(largest, 2));
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    __local int* xq = (__local int*)columns + 8 * g + j / 2 * 4 + j % 2;
    xq[0] = (int)pack4(a * inverse);
    xq[2] = (int)pack4(b * inverse);
    if (j == 0) columns[8 * MAX_GROUPS + g] = largest / 127.0f;
#else
    vstore4(a, 0, columns + 32 * g + 4 * j);
    vstore4(b, 0, columns + 32 * g + 4 * j + 16);
#endif
}

// Stores the columns of the warp's groups, times the norm's weights, in `columns` (local, the warp's own), and their sum of squares
// in `sums`. fragment: for nvidia/product.cl. stream: the stream to add x to first; 0 for none.
//   DOT        int4 [groups][2], words of the lanes' columns, then float [groups], scales
//   otherwise  float [groups][32]
ALWAYS_INLINE void receive(weight_fragment* fragment, const matrix* m, __global const float* x, const uint flag, const bool wait,
                           __global const float* norm, const bool normed, const residual_stream* stream, __local float* columns,
                           __local float* sums) {
    const places p = places_of(m->columns);
    const int lane = p.item % WARP, j = lane % 4, most = p.most / 2, count = p.count / 2, first = p.first, stride = p.stride;
    uint4 words[MAX_GROUPS / 4];
    float4 factors[4];
    float square = 0.0f;
    const int at_hand = normed ? min(most, 2) : 0;
#pragma unroll
    for (int i = 0; i < 2 * at_hand; ++i)
        if (i / 2 < count) factors[i] = vload4(0, norm + first + i / 2 * stride + i % 2 * 16);
    receive4(words, x + first, stride, 16, p.count, p.most, flag, wait);
    if (stream) add_to_stream(stream, words, x + first, &p, flag);
#pragma unroll
    for (int i = 0; i < most; ++i) {
        float4 v[2] = {values_of(words[2 * i]), values_of(words[2 * i + 1])};  // 0 past the last group
        if (m->shares && i < count) {
            const float share = m->shares[SLOT_OF(m, 0, first + i * stride)];
            v[0] *= share;
            v[1] *= share;
        }
        if (normed) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                square += v[k].x * v[k].x + v[k].y * v[k].y + v[k].z * v[k].z + v[k].w * v[k].w;
                if (i < count) v[k] *= i < at_hand ? factors[2 * i + k] : vload4(0, norm + first + i * stride + k * 16);
            }
        }
        put_columns(columns, lane / 4 + 8 * i, j, v[0], v[1]);
    }
    warp_sync();
    if (normed) {
        square = warp_sum(square);
        if (lane == 0) sums[SQUARES_AT + p.item / WARP] = square;
    }
}

// Sums 4 values over the 8 lanes with equal lane % 4. The lane ends with row `sum4_index(lane)`, and so does lane ^ 4.
ALWAYS_INLINE float sum4(const float4 v, const int lane) {
    const bool high = lane & 16, low = lane & 8;
    const float2 kept = high ? v.zw : v.xy, given = high ? v.xy : v.zw;
    const float2 a = kept + (float2)(shuffle_xor(given.x, 16), shuffle_xor(given.y, 16));
    const float b = (low ? a.y : a.x) + shuffle_xor(low ? a.x : a.y, 8);
    return b + shuffle_xor(b, 4);
}
ALWAYS_INLINE int sum4_index(const int lane) { return lane % 4 * 4 + (lane >> 4) * 2 + ((lane >> 3) & 1); }

// Finishes the rows of `count` tiles from `first` on, whose sums are complete.
ALWAYS_INLINE void finish(const matrix* m, const target* to, __local const float* sums, const float scale, const int rows,
                          const int first, const int count) {
    for (int i = this_item(); i < count / TILES(m) * 16; i += WARPS * WARP) {
        const int slot = i / 16 * TILES(m), own_unit = (first + slot) / TILES(m);
        const int row = (m->first_unit + own_unit * m->unit_stride) * 16 + i % 16;
        float y[2] = {0.0f, 0.0f};
#pragma unroll
        for (int t = 0; t < TILES(m); ++t)
#pragma unroll
            for (int k = 0; k < WARPS; ++k) y[t] += sums[(k * SLOTS + slot + t) * 16 + i % 16];
        if (row >= rows) continue;
        float value = y[0] * scale;
        const float bias = to->bias ? bias_of(to, m, rows, row, 0) : 0.0f;
#ifdef GATE
        if (m->gated) {
            float up = y[1] * scale;
            if (to->bias) {
                value = add_rounded(value, bias);
                up = add_rounded(up, bias_of(to, m, rows, row, 1));
            }
            value = APPLY_GATE(value, up, exp, float);
        }
#endif
        deliver(to, row, own_unit * 16 + i % 16, value, to->bias && !m->gated, bias);
    }
}

// The residual stream x of a persistent kernel whose blocks have a norm after them: x += rms_norm(y), y being what a product gave.
//
// The norm needs all of y. So whoever receives y for the next product has all of it in a group, and each group keeps an x of its
// own: a work-item the values that it receives, which are the same ones in each product with x. An x costs no exchange then.
// A barrier of the group joins the sums of squares.
//
// Build: NORM_EPS and HIDDEN where a stream is used; WARPS.
#include "nvidia/flag_in_data.cl"

// A group's stream. A work-item has every STREAM_ITEMS-th float4.
typedef struct {
    __local float4* x;
    __local float4* factors;      // the norm's weights
    __local float* squares;       // [WARPS]; another one for the next norm
    __global const float* norm;   // weights of the norm of what is received; 0: that is x, and has no norm
    __global float* out;          // where x is to be left; 0: nowhere
} residual_stream;
#define STREAM_ITEMS (WARP * WARPS)

#ifdef NORM_EPS
#define PLACE(i) (first + (i) / 2 * stride + (i) % 2 * step)  // as FOUR_AT
// Asks for the norm's weights.
inline void ask_factors(const residual_stream* s, const int first, const int stride, const int step, const int count, const int most,
                        const int item) {
    if (!s->norm) return;
#pragma unroll
    for (int i = 0; i < most; ++i)
        if (i < count) copy16_async(local_address(s->factors + i * STREAM_ITEMS + item), s->norm + PLACE(i), true);
}

// words: what was received at each PLACE(i), i < count <= most; x in its place. For all work-items of a group.
inline void add_to_stream(const residual_stream* s, uint4* words, const int first, const int stride, const int step,
                          const int count, const int most, const int item) {
    if (s->norm) {
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < most; ++i) {
            const float4 v = values_of(words[i]);
            if (i < count) square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
        square = warp_sum(square);
        if (item % WARP == 0) s->squares[item / WARP] = square;
        COPY_WAIT_ALL;
        barrier(CLK_LOCAL_MEM_FENCE);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) sum += s->squares[i];
        const float scale = 1.0f / sqrt(NO_OVERFLOW(sum) / HIDDEN + NORM_EPS);
#pragma unroll
        for (int i = 0; i < most; ++i)
            if (i < count) {
                const int at = i * STREAM_ITEMS + item;
                words[i] = as_uint4(s->x[at] + values_of(words[i]) * scale * s->factors[at]);
            }
    }
#pragma unroll
    for (int i = 0; i < most; ++i)
        if (i < count) {
            s->x[i * STREAM_ITEMS + item] = as_float4(words[i]);
            if (s->out) vstore4(as_float4(words[i]), 0, s->out + PLACE(i));
        }
}
#else
#define ask_factors(s, first, stride, step, count, most, item)
#define add_to_stream(s, words, first, stride, step, count, most, item)
#endif

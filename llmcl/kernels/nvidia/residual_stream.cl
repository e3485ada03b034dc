// The residual stream of a persistent kernel whose work-groups each keep an x of their own: x += y, or x += rms_norm(y), where y is
// what a product gave.
//
// Such a norm needs all of y, and whoever receives y for the next product has all of it in a group; a barrier of the group joins the
// sums of squares. And a reader can add the parts of y, where SPLIT_K groups share a product's columns. A work-item keeps the values
// of x that it receives, which are the same ones in each product with x. So an x costs no exchange.
//
// Build: WARPS, and where a stream is used NORM_EPS, HIDDEN and SPLIT_K. Local memory: residual_stream.
#include "nvidia/flag_in_data.cl"

// Four values at each FOUR_AT(i), i < count <= most, that a work-item receives. most is known when a kernel is compiled.
typedef struct {
    int first, stride, step, count, most, item;
} places;

// A group's stream. A work-item has every STREAM_ITEMS-th float4.
typedef struct {
    __local float4* x;
    __local float4* factors;     // the norm's weights, of ask_factors
    __local float* squares;      // [WARPS]; another one for the next norm
    bool is_first;               // what is received is x
    bool normed;                 // what is received is normalised
    __global float* out;         // where x is to be left; 0: nowhere
} residual_stream;
#define STREAM_ITEMS (WARP * WARPS)
#ifndef SPLIT_K
#define SPLIT_K 1
#endif

#ifdef NORM_EPS
// Asks for the weights of the norm that comes next.
inline places places_of(const int columns);
inline void ask_factors(const residual_stream* s, __global const float* norm) {
    const places p = places_of(HIDDEN);
    __global const float* from = norm + p.first;
#pragma unroll
    for (int i = 0; i < p.most; ++i)
        if (i < p.count)
            copy16_async(local_address(s->factors + i * STREAM_ITEMS + p.item), from + i / 2 * p.stride + i % 2 * p.step, true);
}

// Polls the other parts of y, into words behind those of the first.
inline void poll_parts(uint4* words, __global const float* from, const places* p, const residual_stream* s, const uint flag) {
#pragma unroll
    for (int part = 1; part < SPLIT_K; ++part)
        poll_first(words + part * p->most, from + part * HIDDEN, p->stride, p->step, s->is_first ? 0 : p->count, p->most, flag);
}

// words: the first part of y; x in its place. For all work-items of a group.
inline void add_to_stream(const residual_stream* s, uint4* words, __global const float* from, const places* p, const uint flag) {
    const int count = p->count, most = p->most, item = p->item;
    if (!s->is_first) {
#pragma unroll
        for (int part = 1; part < SPLIT_K; ++part) {
            while (poll_again(words + part * most, from + part * HIDDEN, p->stride, p->step, count, most, flag)) {
            }
#pragma unroll
            for (int i = 0; i < most; ++i)
                words[i] = as_uint4(values_of(words[i]) + values_of(words[part * most + i]));
        }
        float scale = 1.0f;
        if (s->normed) {
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
            scale = 1.0f / sqrt(NO_OVERFLOW(sum) / HIDDEN + NORM_EPS);
        }
#pragma unroll
        for (int i = 0; i < most; ++i)
            if (i < count) {
                const int at = i * STREAM_ITEMS + item;
                float4 v = values_of(words[i]);
                if (s->normed) v *= scale * s->factors[at];
                words[i] = as_uint4(s->x[at] + v);
            }
    }
#pragma unroll
    for (int i = 0; i < most; ++i)
        if (i < count) {
            s->x[i * STREAM_ITEMS + item] = as_float4(words[i]);
            if (s->out) vstore4(as_float4(words[i]), 0, s->out + p->first + i / 2 * p->stride + i % 2 * p->step);
        }
}
#else
#define poll_parts(words, from, p, s, flag)
#define add_to_stream(s, words, from, p, flag)
#endif

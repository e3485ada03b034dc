// The residual stream in a persistent kernel whose work-groups each keep their own x: x += y, or x += rms_norm(y), where y is the
// output of a product.
//
// Such a norm needs all of y. A group that receives y for the next product has all of y; a group barrier joins the sums of squares.
// A reader can also add the parts of y, if SPLIT_K groups share a product's columns. A work-item keeps the values of x that it
// receives, at the same places in each product with x. An own x therefore costs no exchange.
//
// Build: WARPS, and with a stream NORM_EPS, HIDDEN and SPLIT_K. Local memory: residual_stream.
#include "nvidia/flag_in_data.cl"

// Four values at each FOUR_AT(i), i < count <= most, received by a work-item. most is known at compile time.
typedef struct {
    int first, stride, step, count, most, item;
} places;

// A group's stream. A work-item has every STREAM_ITEMS-th float4.
typedef struct {
    __local float4* x;
    __local float4* factors;     // the norm's weights, from ask_factors
    __local float* squares;      // [WARPS]; alternates between norms
    bool is_first;               // the received values are x itself
    bool normed;                 // normalise the received values
    __global float* out;         // destination of x; 0: none
} residual_stream;
#define STREAM_ITEMS (WARP * WARPS)
#ifndef SPLIT_K
#define SPLIT_K 1
#endif

#ifdef NORM_EPS
// Requests the weights of the next norm.
inline places places_of(const int columns);
inline void ask_factors(const residual_stream* s, __global const float* norm) {
    const places p = places_of(HIDDEN);
    __global const float* from = norm + p.first;
#pragma unroll
    for (int i = 0; i < p.most; ++i)
        if (i < p.count)
            copy16_async(local_address(s->factors + i * STREAM_ITEMS + p.item), from + i / 2 * p.stride + i % 2 * p.step, true);
}

// Polls the remaining parts of y, into words after the first part's.
inline void poll_parts(uint4* words, __global const float* from, const places* p, const residual_stream* s, const uint flag) {
#pragma unroll
    for (int part = 1; part < SPLIT_K; ++part)
        poll_first(words + part * p->most, from + part * HIDDEN, p->stride, p->step, s->is_first ? 0 : p->count, p->most, flag);
}

// words: the first part of y; replaced by x. Called by all work-items in a group.
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

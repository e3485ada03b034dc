// Flag-in-data synchronisation, as in NCCL's LL protocol: vectors that pass between the work-groups of a persistent kernel, each
// value with its own sign of being there.
//
// Bit 0 of a float that a group leaves for others is a flag, the parity of how often the value has been written: a reader polls
// a value until its flag is the one it waits for. Value and flag are one word, so no fence stands between them, no group waits
// for another but for the values that it needs, and there is no barrier of all groups. Whoever reads a vector, flagged or not,
// takes bit 0 for 0 (`value_of`), so that both kinds give the same bits.
//
// What a kernel that uses this must see to: every word of a vector is written once in each of its epochs, and no word before all
// readers of the epoch before have it. All groups must run at once. All lanes of a warp receive together.

inline float value_of(const uint word) { return as_float(word & ~1u); }
inline float4 values_of(const uint4 words) { return as_float4(words & ~1u); }

inline void send(__global float* to, const float value, const uint flag) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" : : "l"(to), "r"((as_uint(value) & ~1u) | flag) : "memory");
}

// Polls where a value is missing.
inline void poll4(uint4* words, __global const float* from, const bool missing) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "+r"((*words).x), "+r"((*words).y), "+r"((*words).z), "+r"((*words).w)
                 : "l"(from), "r"((uint)missing)
                 : "memory");
}
inline void poll1(uint* word, __global const float* from, const bool missing) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.relaxed.gpu.global.u32 %0, [%1];}"
                 : "+r"(*word)
                 : "l"(from), "r"((uint)missing)
                 : "memory");
}
inline bool missing4(const uint4 words, const uint flag) {
    return ((words.x ^ flag) | (words.y ^ flag) | (words.z ^ flag) | (words.w ^ flag)) & 1;
}

#define FOUR_AT(i) (from + (i) / 2 * stride + (i) % 2 * step)
// Waits for the answers to poll_first or to the last call; whether values are missing, of any lane, which are polled again.
inline bool poll_again(uint4* words, __global const float* from, const int stride, const int step, const int count, const int most,
                       const uint flag) {
    bool waiting = false;
#pragma unroll
    for (int i = 0; i < most; ++i) {
        const bool missing = i < count && missing4(words[i], flag);
        poll4(words + i, FOUR_AT(i), missing);
        waiting |= missing;
    }
    return warp_any(waiting);
}
// Polls four values at each FOUR_AT(i), i < count <= most; the other words become those of 0.
inline void poll_first(uint4* words, __global const float* from, const int stride, const int step, const int count, const int most,
                       const uint flag) {
#pragma unroll
    for (int i = 0; i < most; ++i) words[i] = (uint4)(flag ^ 1);
    poll_again(words, from, stride, step, count, most, flag);
}
// Receives them. wait: whether values have flags.
inline void receive4(uint4* words, __global const float* from, const int stride, const int step, const int count, const int most,
                     const uint flag, const bool wait) {
    poll_first(words, from, stride, step, count, most, flag);
    while (wait && poll_again(words, from, stride, step, count, most, flag)) {
    }
}

// Two values.
inline float2 receive2(__global const float* a, __global const float* b, const uint flag, const bool wait) {
    uint first = 0, second = 0;
    bool missing = true;
    do {
        poll1(&first, a, missing);
        poll1(&second, b, missing);
        missing = wait && ((first ^ flag) | (second ^ flag)) & 1;
    } while (warp_any(missing));
    return (float2)(value_of(first), value_of(second));
}

// `count` values at a, 32 apart, and as many at b, of each lane.
inline void receive_rows(uint* a_words, uint* b_words, __global const float* a, __global const float* b, const int count,
                         const uint flag, const bool wait) {
    bool waiting;
#pragma unroll
    for (int i = 0; i < count; ++i) a_words[i] = b_words[i] = flag ^ 1;
    do {
        waiting = false;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const bool missing = ((a_words[i] ^ flag) | (b_words[i] ^ flag)) & 1;
            poll1(a_words + i, a + i * WARP, missing);
            poll1(b_words + i, b + i * WARP, missing);
        }
#pragma unroll
        for (int i = 0; i < count; ++i) waiting |= ((a_words[i] ^ flag) | (b_words[i] ^ flag)) & 1;
    } while (warp_any(wait && waiting));
}

// A value with a whole word for its flag, for vectors of which an epoch writes a part only.
inline void send_pair(__global ulong* to, const float value, const uint epoch) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" : : "l"(to), "l"((ulong)epoch << 32 | as_uint(value)) : "memory");
}

// Two of them.
inline float2 receive_pairs(__global const ulong* a, __global const ulong* b, const uint epoch) {
    ulong first, second;
    do {
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(first) : "l"(a) : "memory");
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(second) : "l"(b) : "memory");
    } while (warp_any((uint)(first >> 32) != epoch || (uint)(second >> 32) != epoch));
    return (float2)(as_float((uint)first), as_float((uint)second));
}

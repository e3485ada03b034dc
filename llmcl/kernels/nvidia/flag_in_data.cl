// Flag-in-data synchronisation, as in NCCL's LL protocol: vectors that pass between the work-groups of a persistent kernel, where
// each value carries a flag.
//
// Bit 0 of a float sent to other groups is a flag: the parity of the number of writes to the value. A reader polls a value until
// the flag is the expected flag. Value and flag are in one word, so no fence is needed, a group only waits for the values that it
// needs, and there is no barrier over all groups. Every reader of a vector, flagged or not, takes bit 0 as 0 (`value_of`), so both
// kinds give the same bits.
//
// A kernel that uses this file must guarantee: every word of a vector is written once per epoch, and only after all readers of the
// previous epoch have received it. All groups must run at once. All lanes of a warp receive together.

inline float value_of(const uint word) { return as_float(word & ~1u); }
inline float4 values_of(const uint4 words) { return as_float4(words & ~1u); }

inline void send(__global float* to, const float value, const uint flag) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" : : "l"(to), "r"((as_uint(value) & ~1u) | flag) : "memory");
}

// Polls missing values.
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
// Waits for the answers to poll_first or the last call. Tells whether any lane misses values, and polls again for missing values.
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
// Polls four values at each FOUR_AT(i), i < count <= most; the remaining words become 0.
inline void poll_first(uint4* words, __global const float* from, const int stride, const int step, const int count, const int most,
                       const uint flag) {
#pragma unroll
    for (int i = 0; i < most; ++i) words[i] = (uint4)(flag ^ 1);
    poll_again(words, from, stride, step, count, most, flag);
}
// Receives the values. wait: values have flags.
inline void receive4(uint4* words, __global const float* from, const int stride, const int step, const int count, const int most,
                     const uint flag, const bool wait) {
    poll_first(words, from, stride, step, count, most, flag);
    while (wait && poll_again(words, from, stride, step, count, most, flag)) {
    }
}

// Receives two values.
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

// Receives `count` values at a, 32 apart, and as many at b, for each lane.
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

// A value with a whole word as its flag, for vectors with partial writes in an epoch.
inline void send_pair(__global ulong* to, const float value, const uint epoch) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" : : "l"(to), "l"((ulong)epoch << 32 | as_uint(value)) : "memory");
}

// Receives two such values.
inline float2 receive_pairs(__global const ulong* a, __global const ulong* b, const uint epoch) {
    ulong first, second;
    do {
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(first) : "l"(a) : "memory");
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(second) : "l"(b) : "memory");
    } while (warp_any((uint)(first >> 32) != epoch || (uint)(second >> 32) != epoch));
    return (float2)(as_float((uint)first), as_float((uint)second));
}

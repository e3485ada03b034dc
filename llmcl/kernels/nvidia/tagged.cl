// Vectors that pass between the work-groups of one launch, each value with its own sign of being there.
//
// Bit 0 of a float that a group leaves for others is a tag, the parity of how often the value has been written: a reader asks
// for a value until its tag is the one it waits for. Value and tag are one word, so no fence stands between them, no group waits
// for another but for the values that it needs, and there is no barrier of all groups. Whoever reads a vector, tagged or not,
// takes bit 0 for 0 (`value_of`), so that both kinds give the same bits.
//
// What a kernel that uses this must see to: every word of a vector is written once in each of its turns, and no word before all
// readers of the turn before have it. All groups must run at once. All lanes of a warp receive together.

inline float value_of(const uint word) { return as_float(word & ~1u); }
inline float4 values_of(const uint4 words) { return as_float4(words & ~1u); }

inline void send(__global float* to, const float value, const uint tag) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" : : "l"(to), "r"((as_uint(value) & ~1u) | tag) : "memory");
}

// Asks again where a value lacks.
inline void ask4(uint4* words, __global const float* from, const bool lacks) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "+r"((*words).x), "+r"((*words).y), "+r"((*words).z), "+r"((*words).w)
                 : "l"(from), "r"((uint)lacks)
                 : "memory");
}
inline void ask1(uint* word, __global const float* from, const bool lacks) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.relaxed.gpu.global.u32 %0, [%1];}"
                 : "+r"(*word)
                 : "l"(from), "r"((uint)lacks)
                 : "memory");
}
inline bool lacks4(const uint4 words, const uint tag) {
    return ((words.x ^ tag) | (words.y ^ tag) | (words.z ^ tag) | (words.w ^ tag)) & 1;
}

#define FOUR_AT(i) (from + (i) / 2 * stride + (i) % 2 * step)
// Waits for the answers to ask_first or to the last call; whether values lacked, of any lane, which are asked for again.
inline bool ask_again(uint4* words, __global const float* from, const int stride, const int step, const int count, const int most,
                      const uint tag) {
    bool waiting = false;
#pragma unroll
    for (int i = 0; i < most; ++i) {
        const bool lacks = i < count && lacks4(words[i], tag);
        ask4(words + i, FOUR_AT(i), lacks);
        waiting |= lacks;
    }
    return warp_any(waiting);
}
// Asks for four values at each FOUR_AT(i), i < count <= most; the other words become those of 0.
inline void ask_first(uint4* words, __global const float* from, const int stride, const int step, const int count, const int most,
                      const uint tag) {
#pragma unroll
    for (int i = 0; i < most; ++i) words[i] = (uint4)(tag ^ 1);
    ask_again(words, from, stride, step, count, most, tag);
}
// Receives them. wait: whether values have tags.
inline void receive4(uint4* words, __global const float* from, const int stride, const int step, const int count, const int most,
                     const uint tag, const bool wait) {
    ask_first(words, from, stride, step, count, most, tag);
    while (wait && ask_again(words, from, stride, step, count, most, tag)) {
    }
}

// Two values.
inline float2 receive2(__global const float* a, __global const float* b, const uint tag, const bool wait) {
    uint first = 0, second = 0;
    bool lacks = true;
    do {
        ask1(&first, a, lacks);
        ask1(&second, b, lacks);
        lacks = wait && ((first ^ tag) | (second ^ tag)) & 1;
    } while (warp_any(lacks));
    return (float2)(value_of(first), value_of(second));
}

// A value with a whole word for its tag, for vectors of which a turn writes a part only.
inline void send_pair(__global ulong* to, const float value, const uint turn) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" : : "l"(to), "l"((ulong)turn << 32 | as_uint(value)) : "memory");
}

// Two of them.
inline float2 receive_pairs(__global const ulong* a, __global const ulong* b, const uint turn) {
    ulong first, second;
    do {
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(first) : "l"(a) : "memory");
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(second) : "l"(b) : "memory");
    } while (warp_any((uint)(first >> 32) != turn || (uint)(second >> 32) != turn));
    return (float2)(as_float((uint)first), as_float((uint)second));
}

// PREFETCH(p): asks for the cache line at a global address, which comes into the second-level cache. It may lie past the end of a
// buffer. PREFETCH_ALL(p, bytes): for all lines of so many bytes, a constant. Nothing where a compiler has no such instruction.
//
// A processor asks by itself for what follows in a stream, but not beyond a page of 4 KiB, and too late where it computes with what
// it reads for longer than the memory takes. Lines are asked for one by one between what is computed: many at once make each load wait.
#ifdef __has_builtin
#if __has_builtin(__builtin_prefetch)
#define PREFETCH(p) __builtin_prefetch((const void*)(size_t)(p), 0, 2)
#endif
#endif
#ifndef PREFETCH
#define PREFETCH(p)
#endif
#define PREFETCH_ALL(p, bytes) \
    _Pragma("unroll") for (int line = 0; line < (int)(bytes); line += 64) PREFETCH((__global const uchar*)(p) + line)

// PREFETCH(p): requests the cache line at a global address into the second-level cache. The address may lie past the end of a
// buffer. PREFETCH_ALL(p, bytes): requests all lines in a constant number of bytes. Both do nothing if the compiler lacks the
// instruction.
//
// A processor prefetches a stream by itself, but not beyond a 4 KiB page, and too late if the computation per line takes longer than
// the memory. Lines are requested one by one between computations: many at once make each load wait.
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

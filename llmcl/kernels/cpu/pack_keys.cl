// Packs a key array into the cache's tiles, for attention on arrays on a CPU: transposes 16 x 16 blocks in registers.
//
// keys     KV [heads][n_keys][HEAD_DIM], heads of all batches in sequence
// tiles    KV [heads][capacity/16][HEAD_DIM][16]; columns past the last key repeat the last key
//
// A transposition round interleaves rows i and i + 8: it rotates the 8 bits (row, column) of an element's position by
// one, and four rounds exchange row and column.
//
// Index space: (ceil(n_keys / 16), heads), local size 1. Build: KV (f32, f16 or bf16), HEAD_DIM (a multiple of 16).
#if !defined(KV) || !defined(HEAD_DIM)
#error "cpu/pack_keys.cl needs the build constants KV, HEAD_DIM"
#endif
#include "common/common.cl"

#define VECTOR_f32 float16
#define VECTOR_f16 ushort16
#define VECTOR_bf16 ushort16
typedef CAT(VECTOR_, KV) vector;

inline void interleave(const vector* from, vector* to) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        to[2 * i].even = from[i].lo;
        to[2 * i].odd = from[i + 8].lo;
        to[2 * i + 1].even = from[i].hi;
        to[2 * i + 1].odd = from[i + 8].hi;
    }
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void pack_keys(__global const CAT(KV, _t)* keys, __global CAT(KV, _t)* tiles, const int n_keys, const int capacity) {
    const int tile = get_group_id(0), head = get_group_id(1);
    keys += (size_t)head * n_keys * HEAD_DIM;
    tiles += ((size_t)head * capacity + tile * 16) * HEAD_DIM;
    for (int d = 0; d < HEAD_DIM; d += 16) {
        vector a[16], b[16];
#pragma unroll
        for (int i = 0; i < 16; ++i)
            a[i] = *(__global const vector*)(keys + (size_t)min(tile * 16 + i, n_keys - 1) * HEAD_DIM + d);
        interleave(a, b);
        interleave(b, a);
        interleave(a, b);
        interleave(b, a);
#pragma unroll
        for (int i = 0; i < 16; ++i) *(__global vector*)(tiles + (d + i) * 16) = a[i];
    }
}

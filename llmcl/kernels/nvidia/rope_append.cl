// rope_append (rope_append.cl: formula and arguments) for 16-bit caches: writes whole tiles of keys at once.
//
// Index space: groups (tiles of 16 positions that n tokens can touch, heads) with 128 work-items. A group rotates a head's queries
// in place, or writes a tile of its keys (32 bytes per work-item and dimension), or of its values (16 bytes per work-item). In a
// step with several sequences (step_rows.cl) a tile is a piece of a run, cut at positions that are multiples of 16. With CHAINED
// the file is the function `rope_append_unit` in nvidia/few_rows_chain.cl, and other groups in the launch have written qkv.
// Build: see rope_append.cl; KV f16 or bf16; values beyond float16 become float16's largest.
#if !defined(KV) || !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(HEAD_DIM) || !defined(CAPACITY) || \
    !defined(LOCAL_SIZE) || !defined(STATE_POSITION) || !defined(STATE_N_TOKENS)
#error "nvidia/rope_append.cl needs the build constants of rope_append.cl"
#endif
#include "common/common.cl"
#include "nvidia/ptx.cl"
#include "common/kv_address.cl"
#include "common/step_rows.cl"

#define QUADS (HEAD_DIM / 8)  // neighbouring dimensions in half a head

#ifndef CHAINED
#define CHAINED 0
#endif

// The work of a group: a tile and a head. done, count: see few_rows_unit in nvidia/linear_few_rows.cl.
inline void rope_append_unit(const int tile, const int head, volatile __global const uint* done, const uint count,
                             __global float* qkv, __global const float* rope, __global const int* state,
                             __global CAT(KV, _t)* k_cache, __global CAT(KV, _t)* v_cache) {
    const int lid = get_local_id(0);
    // The tile's positions begin at `start`, row `first` of the step; its tokens are t0 to before n.
#ifdef STATE_PIECES
    const int4 piece = piece_at(state, tile);
    const int t0 = piece.y, n = t0 + piece.z, start = piece.w / 16 * 16, first = t0 - piece.w % 16;
    state = sequence_at(state, piece.x);
#else
    const int position = state[STATE_POSITION], t0 = 0, n = state[STATE_N_TOKENS];
    const int start = (position / 16 + tile) * 16, first = start - position;
#endif
    const size_t stride = (N_Q_HEADS + 2 * N_KV_HEADS) * HEAD_DIM;
    if (first >= n) return;
#if CHAINED
    wait_until(done, count);
#endif
    qkv += (size_t)head * HEAD_DIM;

    if (head < N_Q_HEADS) {
        for (int unit = lid; unit < 16 * QUADS; unit += LOCAL_SIZE) {
            const int t = first + unit / QUADS, i = unit % QUADS * 4;
            if (t < t0 || t >= n) continue;
            __global float* x = qkv + t * stride + i;
            __global const float* r = rope + (size_t)t * HEAD_DIM + i;
            const float4 a = vload4(0, x), b = vload4(0, x + HEAD_DIM / 2), c = vload4(0, r), s = vload4(0, r + HEAD_DIM / 2);
            vstore4(a * c - b * s, 0, x);
            vstore4(b * c + a * s, 0, x + HEAD_DIM / 2);
        }
        return;
    }
    const int row = kv_row(state, start);  // a tile lies in a single page
    if (head < N_Q_HEADS + N_KV_HEADS) {
        k_cache += ((size_t)(head - N_Q_HEADS) * CAPACITY + row) * HEAD_DIM;
        for (int d = lid; d < HEAD_DIM / 2; d += LOCAL_SIZE) {
            float low[16], high[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const int t = clamp(first + i, t0, n - 1);
                const float a = qkv[t * stride + d], b = qkv[t * stride + HEAD_DIM / 2 + d];
                const float c = rope[(size_t)t * HEAD_DIM + d], s = rope[(size_t)t * HEAD_DIM + HEAD_DIM / 2 + d];
                low[i] = a * c - b * s;
                high[i] = b * c + a * s;
            }
#pragma unroll
            for (int half_of = 0; half_of < 2; ++half_of) {
                const float* v = half_of ? high : low;
                uint words[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) words[i] = CAT(narrow_, KV)(v[2 * i], v[2 * i + 1]);
                __global ushort* to = (__global ushort*)k_cache + (d + half_of * (HEAD_DIM / 2)) * 16;
                if (first >= t0 && first + 16 <= n) {
                    ((__global uint4*)to)[0] = (uint4)(words[0], words[1], words[2], words[3]);
                    ((__global uint4*)to)[1] = (uint4)(words[4], words[5], words[6], words[7]);
                } else {
#pragma unroll
                    for (int i = 0; i < 16; ++i)
                        if (first + i >= t0 && first + i < n) to[i] = (ushort)(words[i / 2] >> (i % 2 * 16));
                }
            }
        }
        return;
    }
    v_cache += ((size_t)(head - N_Q_HEADS - N_KV_HEADS) * CAPACITY + row) * HEAD_DIM;
    for (int unit = lid; unit < 16 * QUADS; unit += LOCAL_SIZE) {
        const int t = first + unit / QUADS;
        if (t < t0 || t >= n) continue;
        const float8 v = vload8(unit % QUADS, qkv + t * stride);
        ((__global uint4*)v_cache)[unit] = (uint4)(CAT(narrow_, KV)(v.s0, v.s1), CAT(narrow_, KV)(v.s2, v.s3),
                                                   CAT(narrow_, KV)(v.s4, v.s5), CAT(narrow_, KV)(v.s6, v.s7));
    }
}

#if !CHAINED
__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void rope_append(__global float* qkv, __global const float* rope, __global const int* state,
                 __global CAT(KV, _t)* k_cache, __global CAT(KV, _t)* v_cache) {
    rope_append_unit(get_group_id(0), get_group_id(1), 0, 0, qkv, rope, state, k_cache, v_cache);
}
#endif

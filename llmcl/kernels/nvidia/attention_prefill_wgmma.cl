// Flash attention for the tokens of a step on the matrix units of Hopper GPUs, by asynchronous warpgroup products (wgmma).
// Formula and arguments as in cpu/attention_prefill.cl; queries and softmax weights are rounded to the cache's 16 bits,
// sums are float32. Source: Shah et al., "FlashAttention-3" (2024): scores of the next keys are computed while the present
// values are multiplied.
//
// A work-group takes BLOCK_M = 128 query rows of one head. Two warpgroups have 64 rows each; scores, weights and output of a
// row stay in a warp's registers. Two further warps copy keys and values, BLOCK_N = 128 of them a tile, into STAGES buffers
// each in local memory; they alone ask which tiles a mask hides.
//
//            local memory:  Q  8 rows x 8 columns a block, [16][HEAD_DIM / 8][8][8]              (NO_SWIZZLE of wgmma.cl)
//                           K  key tile i, dimension d at (i HEAD_DIM + d) 32, halves exchanged  (SWIZZLE_32)
//                           V  columns 64 c to 64 c + 63 of key j at (BLOCK_N c + j) 128         (SWIZZLE_128)
//
// Index space: groups (N_Q_HEADS, ceil(n / BLOCK_M), batch) of 320; the longest rows are taken first.
// Build: KV (f16 or bf16), HEAD_DIM (64 or 128), N_KV_HEADS, those of query_address.cl, CAPACITY (a multiple of 64),
// SCALE, KV_BLOCK_RANGES, LSE, BLOCK_M (128), BLOCK_N (128), DV_TILE (HEAD_DIM). With PACKED_OUT (one batch, tokens first) out is
// OUT (f16 or bf16) [ceil(n/128) 16][N_Q_HEADS HEAD_DIM / 8][8][8]: what the next product takes (pack_activations.cl).
// Local memory: 256 HEAD_DIM (1 + 2 STAGES) bytes and a little. For pages of keys and values see kv_address.cl.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(CAPACITY) || \
    !defined(SCALE) || !defined(BLOCK_M) || !defined(BLOCK_N) || !defined(Q_STRIDE) || !defined(KV_BLOCK_RANGES) || \
    !defined(LSE) || !defined(STATE_POSITION) || !defined(STATE_N_TOKENS)
#error "nvidia/attention_prefill_wgmma.cl needs the build constants named in its head"
#endif
#if BLOCK_M != 128 || BLOCK_N != 128 || (HEAD_DIM != 64 && HEAD_DIM != 128)
#error "nvidia/attention_prefill_wgmma.cl: BLOCK_M and BLOCK_N are 128, HEAD_DIM 64 or 128"
#endif
#include "common/common.cl"
#include "nvidia/wgmma.cl"
#include "common/online_softmax.cl"
#include "common/attention_mods.cl"
#include "common/kv_block_ranges.cl"
#include "common/kv_address.cl"
#include "nvidia/fragment_scores.cl"
#include "common/query_address.cl"

#ifndef STAGES
#define STAGES 2
#endif
#define CONSUMER_WARPS 8
#define GROUP_ITEMS ((CONSUMER_WARPS + 2) * WARP)
#define TILE_BYTES (BLOCK_N * HEAD_DIM * 2)
#define PAGE_KEYS 64  // of a tile that surely lie in one page
#define LOG2E 1.4426950408889634f
#if HEAD_DIM == 128
#define MULTIPLY_VALUES WGMMA_FRAGMENTS_128
#else
#define MULTIPLY_VALUES WGMMA_FRAGMENTS_64
#endif

// A tile of keys: its first position, how many are there, and which of them are seen (TILE_*); first < 0 after the last.
typedef struct {
    int first, n_keys, seen_as;
} tile;

inline float exp2_quick(const float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// The scores of a tile in base 2 (times log2 e), masked and modified.
inline void mask_scores(float s[BLOCK_N / 2], const tile t, const int batch, const int head, const int rows[2], const int column,
                        const int first_row MOD_PARAMS) {
    const bool whole = t.seen_as == TILE_FULL && (KV_BLOCK_RANGES ? t.n_keys == BLOCK_N : t.first + BLOCK_N <= first_row + 1);
    if (!HAS_SCORE_MOD && whole) return;
    modify_scores(s, BLOCK_N / 2, 1.0f / LOG2E, batch, head, rows, t.first + column, t.first + t.n_keys, t.seen_as MOD_ARGS);
}

// Scores become softmax weights; m and l of the lane's two rows (l: of its columns only) move on, and with them
// `shrink`, what the output so far is to be multiplied by.
inline void update_softmax(float s[BLOCK_N / 2], float m[2], float l[2], float shrink[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float top = m[h];
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; ++i) top = fmax(top, fmax(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
        top = fmax(top, shuffle_xor(top, 1));
        top = fmax(top, shuffle_xor(top, 2));
        const float from = top == -INFINITY ? 0.0f : top;  // a row that has seen no key yet
        shrink[h] = exp2_quick(m[h] - from);
        m[h] = top;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; ++i) {
            s[4 * i + 2 * h] = exp2_quick(s[4 * i + 2 * h] - from);
            s[4 * i + 2 * h + 1] = exp2_quick(s[4 * i + 2 * h + 1] - from);
            sum += s[4 * i + 2 * h] + s[4 * i + 2 * h + 1];
        }
        l[h] = l[h] * shrink[h] + sum;
    }
}

inline void narrow_weights(uint4 p[BLOCK_N / 16], const float s[BLOCK_N / 2]) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 16; ++i)
        p[i] = (uint4)(CAT(narrow_weights_, KV)(s[8 * i], s[8 * i + 1]), CAT(narrow_weights_, KV)(s[8 * i + 2], s[8 * i + 3]),
                       CAT(narrow_weights_, KV)(s[8 * i + 4], s[8 * i + 5]), CAT(narrow_weights_, KV)(s[8 * i + 6], s[8 * i + 7]));
}

__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1)))
void attention_prefill(__global const float* queries, __global const int* state, __global const CAT(KV, _t)* k_cache,
                       __global const CAT(KV, _t)* v_cache, __global void* out, __global float* lse,
                       __global const int* ranges MOD_PARAMS) {
    __local uint4 __attribute__((aligned(1024))) buffers[(BLOCK_M * HEAD_DIM * 2 + 2 * STAGES * TILE_BYTES) / 16];
    __local ulong mbarriers[4 * STAGES];
    __local tile tiles[STAGES];
    const uint qs = local_address(buffers), ks = qs + BLOCK_M * HEAD_DIM * 2, vs = ks + STAGES * TILE_BYTES;
    // Keys and values of a stage there, and done with.
    const uint k_full = local_address(mbarriers), k_empty = k_full + 8 * STAGES, v_full = k_empty + 8 * STAGES;
    const uint v_empty = v_full + 8 * STAGES;
    const int lane = get_local_id(0) % WARP, warp = get_local_id(0) / WARP;
    const int head = get_group_id(0), batch = get_group_id(2);
    const int t0 = (get_num_groups(1) - 1 - get_group_id(1)) * BLOCK_M;
    const int position = state[STATE_POSITION], n = state[STATE_N_TOKENS];
    if (t0 >= n) return;
    if (get_local_id(0) == 0)
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(k_full + 8 * i, WARP + 1);
            mbarrier_init(v_full + 8 * i, WARP);
            mbarrier_init(k_empty + 8 * i, CONSUMER_WARPS);
            mbarrier_init(v_empty + 8 * i, CONSUMER_WARPS);
        }
    barrier(CLK_LOCAL_MEM_FENCE);

    if (warp >= CONSUMER_WARPS) {
        const bool of_keys = warp == CONSUMER_WARPS;  // else of values
        const int kv_head = head / (N_Q_HEADS / N_KV_HEADS);
        k_cache += ((size_t)batch * N_KV_HEADS + kv_head) * CAPACITY * HEAD_DIM;
        v_cache += ((size_t)batch * N_KV_HEADS + kv_head) * CAPACITY * HEAD_DIM;
        const int2 group_rows = (int2)(position + t0, position + min(t0 + BLOCK_M, n) - 1);
        int stage = 0;
        uint parity = 1;
        kv_block_ranges left = RANGES_OF(batch, head, t0 / BLOCK_M, group_rows, position + min(t0 + BLOCK_M, n));
        for (int2 range = take_range(&left); range.y > 0; range = take_range(&left)) {
            for (int j = RANGE_FIRST(range); j < range.y; j += BLOCK_N) {
                const int n_keys = min(BLOCK_N, range.y - j);
                const int seen_as = class_in_range(range, batch, head, group_rows, j, j + n_keys MOD_ARGS);
                if (seen_as == TILE_EMPTY) continue;
                const int at[2] = {kv_row(state, j), n_keys > PAGE_KEYS ? kv_row(state, j + PAGE_KEYS) : 0};
                if (of_keys) {
                    mbarrier_wait(k_empty + 8 * stage, parity);
                    if (lane == 0) {
                        tiles[stage].first = j;
                        tiles[stage].n_keys = n_keys;
                        tiles[stage].seen_as = seen_as;
                        mbarrier_arrive(k_full + 8 * stage);
                    }
                    const uint to = ks + stage * TILE_BYTES + (lane ^ ((lane >> 3) & 1)) * 16;
#pragma unroll
                    for (int half_of = 0; half_of < 2; ++half_of) {
                        __global const CAT(KV, _t)* k = k_cache + (size_t)at[half_of] * HEAD_DIM + lane * 8;
#pragma unroll
                        for (int i = 0; i < TILE_BYTES / 1024; ++i)  // tiles of 16 keys without any need not be there
                            copy16_async(to + half_of * (TILE_BYTES / 2) + i * 512, k + i * 256,
                                         half_of * PAGE_KEYS + i / (HEAD_DIM / 16) * 16 < n_keys);
                    }
                    mbarrier_arrive_copied(k_full + 8 * stage);
                } else {
                    // Rows past the last key become zero: a weight of 0 times whatever the cache holds there must be 0.
                    mbarrier_wait(v_empty + 8 * stage, parity);
                    const int key = lane / (HEAD_DIM / 8), c = lane % (HEAD_DIM / 8);
                    const uint to = vs + stage * TILE_BYTES + c / 8 * (BLOCK_N * 128) + key * 128;
#pragma unroll
                    for (int half_of = 0; half_of < 2; ++half_of) {
                        __global const CAT(KV, _t)* v = v_cache + (size_t)at[half_of] * HEAD_DIM + lane * 8;
#pragma unroll
                        for (int i = 0; i < TILE_BYTES / 1024; ++i) {
                            const int row = half_of * PAGE_KEYS + i * (256 / HEAD_DIM);  // from the lane's first
                            copy16_async(to + row * 128 + ((c ^ (row + key)) & 7) * 16, v + i * 256, row + key < n_keys);
                        }
                    }
                    mbarrier_arrive_copied(v_full + 8 * stage);
                }
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
            }
        }
        if (of_keys) {
            mbarrier_wait(k_empty + 8 * stage, parity);
            if (lane == 0) {
                tiles[stage].first = -1;
                mbarrier_arrive(k_full + 8 * stage);
            }
            mbarrier_arrive_copied(k_full + 8 * stage);
        }
        COPY_WAIT(0);
        return;
    }

    // The lane's two rows, and the first of its two columns in every 8.
    queries += first_query(batch, head, n);
    const int t_first = t0 + warp * 16 + lane / 4, column = 2 * (lane % 4);
    const int rows[2] = {position + min(t_first, n - 1), position + min(t_first + 8, n - 1)};
    const uint q_to = qs + (warp * 2 * (HEAD_DIM / 8) * WARP + lane) * 4;  // a block is 128 bytes, a lane's share 4
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        __global const float2* from = (__global const float2*)(queries + (size_t)min(t_first + 8 * h, n - 1) * Q_STRIDE + column);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i) {
            const float2 v = from[4 * i] * (SCALE * LOG2E);
            store4_local(q_to + (h * (HEAD_DIM / 8) + i) * 128, CAT(narrow_, KV)(v.x, v.y));
        }
    }
    local_fence_async();
    named_barrier(1 + warp / 4, WARPGROUP);
    const ulong q_operand = wgmma_operand(qs + warp / 4 * (64 * HEAD_DIM * 2), 128, HEAD_DIM * 16, NO_SWIZZLE);
    const ulong k_operand = wgmma_operand(ks, HEAD_DIM * 32, 256, SWIZZLE_32);
    const ulong v_operand = wgmma_operand(vs, BLOCK_N * 128, 1024, SWIZZLE_128);
    float s[BLOCK_N / 2], acc[HEAD_DIM / 2], m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f}, shrink[2];
    uint4 p[BLOCK_N / 16];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) acc[i] = 0;

#define MULTIPLY_KEYS(at)                                                                                        \
    WGMMA_128(KV, s, q_operand, k_operand + (at) * (TILE_BYTES / 16), 0);                                        \
    _Pragma("unroll") for (int i = 1; i < HEAD_DIM / 16; ++i)                                                    \
        WGMMA_128(KV, s, q_operand + i * 16, k_operand + (at) * (TILE_BYTES / 16) + i * 32, 1);                  \
    wgmma_commit()
#define MULTIPLY_VALUES_OF(at)                                                                                   \
    _Pragma("unroll") for (int i = 0; i < BLOCK_N / 16; ++i)                                                     \
        MULTIPLY_VALUES(KV, acc, p[i], v_operand + (at) * (TILE_BYTES / 16) + i * 128, 1);                       \
    wgmma_commit()
#if HEAD_DIM == 128
#define SETTLE_OUTPUT        \
    WGMMA_SETTLE32(acc, 0); \
    WGMMA_SETTLE32(acc, 32)
#else
#define SETTLE_OUTPUT WGMMA_SETTLE32(acc, 0)
#endif

    int stage = 0;
    uint parity = 0;
    mbarrier_wait(k_full, 0);
    tile present = tiles[0];
    if (present.first >= 0) {
        local_fence_async();
        wgmma_fence();
        MULTIPLY_KEYS(0);
        WGMMA_WAIT(0);
        WGMMA_SETTLE32(s, 0);
        WGMMA_SETTLE32(s, 32);
        if (lane == 0) mbarrier_arrive(k_empty);
        mask_scores(s, present, batch, head, rows, column, position + t0 + warp * 16 MOD_ARGS);
        update_softmax(s, m, l, shrink);
        narrow_weights(p, s);
        while (true) {
            const int next_stage = stage + 1 == STAGES ? 0 : stage + 1;
            const uint next_parity = stage + 1 == STAGES ? parity ^ 1 : parity;
            mbarrier_wait(k_full + 8 * next_stage, next_parity);
            present = tiles[next_stage];
            if (present.first < 0) break;
            mbarrier_wait(v_full + 8 * stage, parity);
            local_fence_async();
            wgmma_fence();
            MULTIPLY_KEYS(next_stage);
            MULTIPLY_VALUES_OF(stage);
            WGMMA_WAIT(1);
            WGMMA_SETTLE32(s, 0);
        WGMMA_SETTLE32(s, 32);
            if (lane == 0) mbarrier_arrive(k_empty + 8 * next_stage);
            mask_scores(s, present, batch, head, rows, column, position + t0 + warp * 16 MOD_ARGS);
            update_softmax(s, m, l, shrink);
            WGMMA_WAIT(0);
            SETTLE_OUTPUT;
            if (lane == 0) mbarrier_arrive(v_empty + 8 * stage);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 2; ++i) acc[i] *= shrink[i / 2 % 2];
            narrow_weights(p, s);
            stage = next_stage;
            parity = next_parity;
        }
        mbarrier_wait(v_full + 8 * stage, parity);
        local_fence_async();
        wgmma_fence();
        MULTIPLY_VALUES_OF(stage);
        WGMMA_WAIT(0);
        SETTLE_OUTPUT;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float sum = l[h] + shuffle_xor(l[h], 1);
        sum += shuffle_xor(sum, 2);
        const int t = t_first + 8 * h;
        const float norm = softmax_norm(sum);
#if PACKED_OUT
        __global uint* y = (__global uint*)out + ((size_t)(t / 8) * (N_Q_HEADS * HEAD_DIM / 8) + head * (HEAD_DIM / 8)) * WARP + lane;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i)
            y[i * WARP] = CAT(narrow_, OUT)(acc[4 * i + 2 * h] * norm, acc[4 * i + 2 * h + 1] * norm);
#else
        if (t >= n) continue;
        __global float* y = (__global float*)out + output_of(batch, head, t, n) + column;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i)
            *(__global float2*)(y + i * 8) = (float2)(acc[4 * i + 2 * h], acc[4 * i + 2 * h + 1]) * norm;
#endif
#if LSE
        if (t < n && lane % 4 == 0)
            lse[((size_t)batch * N_Q_HEADS + head) * n + t] = sum > 0.0f ? m[h] / LOG2E + log(sum) : -INFINITY;
#endif
    }
}

// Flash attention on arrays (nvidia/attention_arrays.cl) on the matrix units of Hopper GPUs, by asynchronous warpgroup products
// (wgmma) and the copy engine. Formula and arguments as in cpu/attention_prefill.cl; queries and softmax weights have the 16-bit
// type of keys and values, sums are float32. Source: Shah et al., "FlashAttention-3" (2024): the next keys' scores are computed
// during the product with the current values, and a tile's softmax overlaps with the products of both warpgroups.
//
// Each work-group stays on a compute unit and takes one item after the other: BLOCK_M = 128 query rows of one head. Two warpgroups
// have 64 rows each; a row's scores, weights and output stay in a warp's registers. A third warpgroup requests queries, keys and
// values, BLOCK_N = 128 keys per tile, in STAGES buffers each in local memory (prefill_copies.cl). It requests the next item's data
// while the others write an item's output, and it alone asks which tiles a mask hides.
//
//            local memory:  Q  columns 64 c to 64 c + 63 of row j in a warpgroup at (64 c + j) 128  (ROWS_128 in wgmma.cl)
//                           K  columns 64 c to 64 c + 63 of key j at (BLOCK_N c + j) 128            (ROWS_128)
//                           V  the same                                                            (SWIZZLE_128)
//
// Arrays may have WIDTH columns, a multiple of 8 below HEAD_DIM. The copy engine fills up rows in local memory with zeros, and the
// products leave out most of them.
//
// tensor_maps  see prefill_copies.cl
//
// Index space: groups (any number, 1, batch) with 384 work-items; each group takes items in turns. With ORDER (an expression; needs
// KV_BLOCK_RANGES) the items are block N_Q_HEADS + head in ranges[ORDER ..], otherwise items with the longest rows come first.
// Build: KV (f16 or bf16), HEAD_DIM (64 or 128), N_KV_HEADS, constants for query_address.cl and attention_arrays.cl, SCALE,
// KV_BLOCK_RANGES, LSE, BLOCK_M (128), BLOCK_N (128), DV_TILE (HEAD_DIM), optional WIDTH.
// Local memory: 256 HEAD_DIM (1 + 2 STAGES) bytes and a little. For pages of keys and values see kv_address.cl.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(CAPACITY) || \
    !defined(SCALE) || !defined(BLOCK_M) || !defined(BLOCK_N) || !defined(Q_STRIDE) || !defined(KV_BLOCK_RANGES) || \
    !defined(LSE) || !defined(STATE_POSITION) || !defined(STATE_N_TOKENS) || !defined(STRIDES) || !defined(OUT)
#error "nvidia/attention_prefill_arrays_wgmma.cl needs the build constants named in its head"
#endif
#if BLOCK_M != 128 || BLOCK_N != 128 || (HEAD_DIM != 64 && HEAD_DIM != 128)
#error "nvidia/attention_prefill_arrays_wgmma.cl: BLOCK_M and BLOCK_N are 128, HEAD_DIM 64 or 128"
#endif
#include "common/common.cl"
#include "nvidia/wgmma.cl"
#include "nvidia/wgmma_chains.cl"
#include "common/online_softmax.cl"
#include "common/attention_mods.cl"
#include "common/kv_block_ranges.cl"
#include "common/kv_address.cl"
#include "nvidia/key_tiles.cl"
#include "nvidia/quick_exponent.cl"
#define QUICK_TANH 1  // precise enough beside 16-bit operands
#ifndef HAS_SOFT_CAP
#define HAS_SOFT_CAP 0
#endif
#if HAS_SOFT_CAP
#undef HAS_SCORE_MOD  // the softmax computes the score_mod
#define HAS_SCORE_MOD 0
#endif
#include "nvidia/fragment_scores.cl"
#include "nvidia/attention_arrays.cl"
#include "common/query_block.cl"

#define STAGES 3
#define CONSUMER_WARPS 8
#define PRODUCER_WARPS 4
#define MORE_REGISTERS 232  // per consumer work-item; with FEWER_REGISTERS per producer work-item, they add up to a work-group's registers
#define FEWER_REGISTERS 40
#define GROUP_ITEMS ((CONSUMER_WARPS + PRODUCER_WARPS) * WARP)
#define TILE_BYTES (BLOCK_N * HEAD_DIM * 2)
#if HEAD_DIM == 64
#define OUT_COLUMNS 64  // computed; a lane has half as many sums
#define KEYS_BY_QUERIES WGMMA_ROWS_128_CHAIN_4
#define MULTIPLY_VALUES WGMMA_FRAGMENTS_64_CHAIN_8
#elif WIDTH <= 96
#define OUT_COLUMNS 96
#define KEYS_BY_QUERIES WGMMA_ROWS_128_CHAIN_6
#define MULTIPLY_VALUES WGMMA_FRAGMENTS_96_CHAIN_8
#else
#define OUT_COLUMNS 128
#define KEYS_BY_QUERIES WGMMA_ROWS_128_CHAIN_8
#define MULTIPLY_VALUES WGMMA_FRAGMENTS_128_CHAIN_8
#endif
// Scores in the matrix units' sums only need the exponential's factor, unless a score_mod changes the scores.
#define SCORE_SCALE ((float)(SCALE)*SCORE_UNIT)
#define SCALED_FIRST ((HAS_SCORE_MOD && !HAS_KEY_SLOPE) || !(SCALE > 0.0f))

#include "nvidia/prefill_items.cl"

#if HAS_SOFT_CAP
inline float quick_tanh(const float x) {
    float r;
    asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
#include "nvidia/capped_exponents.cl"
#define EXPONENT_SCALE 1.0f
#else
#define EXPONENT_SCALE (SCORE_FACTOR * LOG2E * (SCALED_FIRST ? 1.0f : SCORE_SCALE))
#endif

// A store that never happens, because sums of weights are not negative. Without the store, the assembler waits for the value
// product before the softmax instead of overlapping them; with a branch in place of the store, it serialises all products (C7518).
inline void store_if_negative(const float sum, const uint to) {
    asm volatile("{.reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.f32 [%1], %0;}" : : "f"(sum), "r"(to) : "memory");
}

// Masks and modifies a tile's scores, in units of EXPONENT_SCALE and without the row's bias.
inline void mask_scores(float s[BLOCK_N / 2], const row_terms terms, const tile t, const int sequence, const int head,
                        const int rows[2], const int column, const int first_row MOD_PARAMS) {
    const bool whole = t.seen_as == TILE_FULL && (KV_BLOCK_RANGES ? t.n_keys == BLOCK_N : t.first + BLOCK_N <= first_row + 1);
    if ((!HAS_SCORE_MOD || HAS_KEY_SLOPE) && SCALED_FIRST) {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) s[i] *= SCORE_SCALE;
    }
    if (!HAS_SCORE_MOD && whole) return;
    modify_scores(s, BLOCK_N / 2, terms, SCORE_SCALE, 1.0f, sequence, head, rows, t.first + column, t.first + t.n_keys, t.seen_as,
                  whole MOD_ARGS);
}

#define TERMS_OF(t) terms_of(SCALED_FIRST ? 1.0f : SCORE_SCALE, sequence, present.head, rows, (t).first + column MOD_ARGS)

// Computes each row's largest score, with the row's bias.
inline void row_tops(float top[2], const float s[BLOCK_N / 2], const row_terms terms) {
    float part[4] = {s[0], s[2], s[1], s[3]};
#pragma unroll
    for (int i = 1; i < BLOCK_N / 8; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            part[h] = fmax(part[h], s[4 * i + 2 * h]);
            part[2 + h] = fmax(part[2 + h], s[4 * i + 2 * h + 1]);
        }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        top[h] = fmax(part[h], part[2 + h]) + terms.bias[h];  // bias differs between the lanes of a row
        top[h] = fmax(top[h], shuffle_xor(top[h], 1));
        top[h] = fmax(top[h], shuffle_xor(top[h], 2));
    }
}
// Like row_tops, for scores without a bias, compared as integers: the assembler compares three integers at once. Correct if the
// result is at least 0; if all scores in a row are negative, the result is some score of the row.
inline void row_tops_as_ints(float top[2], const float s[BLOCK_N / 2]) {
    int part[4] = {as_int(s[0]), as_int(s[2]), as_int(s[1]), as_int(s[3])};
#pragma unroll
    for (int i = 1; i < BLOCK_N / 8; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            part[h] = max(part[h], as_int(s[4 * i + 2 * h]));
            part[2 + h] = max(part[2 + h], as_int(s[4 * i + 2 * h + 1]));
        }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int of_row = max(part[h], part[2 + h]), other = shuffle_int(of_row, 1);
        of_row = max(of_row, other);
        other = shuffle_int(of_row, 2);
        top[h] = as_float(max(of_row, other));
    }
}

// Turns scores into softmax weights, updates m and l for the lane's two rows (l: its columns only), and sets `shrink`, the factor
// for the output so far.
inline void update_softmax(float s[BLOCK_N / 2], const row_terms terms, float m[2], float l[2], float shrink[2]) {
    float top[2], from[2], sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#if HAS_SOFT_CAP
    row_tops_as_ints(top, s);
#else
    row_tops(top, s, terms);
#endif
// Turns scores into powers of 2 with these exponents.
#define TO_WEIGHTS(exponent)                                  \
    _Pragma("unroll") for (int i = 0; i < BLOCK_N / 2; ++i) { \
        s[i] = exp2_quick(exponent(s[i], from[i / 2 % 2]));   \
        sums[i % 4] += s[i];                                  \
    }
#if HAS_SOFT_CAP
    const float last[2] = {m[0], m[1]};
    bool near = !warp_any(!near_cap(m, last, top, 0.0f));
    if (!near) {  // or the largest scores are negative
        row_tops(top, s, terms);
        near = !warp_any(!near_cap(m, last, top, LEAST_EXPONENT));
        if (!near) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                m[h] = fmax(last[h], far_exponent(top[h], 0.0f));
                from[h] = m[h] == -INFINITY ? 0.0f : m[h];  // a row without keys so far
                shrink[h] = exp2_quick(last[h] - from[h]);
            }
            TO_WEIGHTS(far_exponent);
        }
    }
    if (near) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            from[h] = m[h];
            shrink[h] = exp2_quick(last[h] - from[h]);
        }
        TO_WEIGHTS(near_exponent);
    }
#else
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        top[h] = fmax(m[h], top[h]);
        from[h] = top[h] == -INFINITY ? 0.0f : top[h] * EXPONENT_SCALE;  // a row without keys so far
        shrink[h] = exp2_quick(m[h] * EXPONENT_SCALE - from[h]);
        m[h] = top[h];
        from[h] -= terms.bias[h] * EXPONENT_SCALE;
    }
#define EXPONENT(s, from) fma(s, EXPONENT_SCALE, -(from))
    TO_WEIGHTS(EXPONENT);
#endif
#pragma unroll
    for (int h = 0; h < 2; ++h) l[h] = l[h] * shrink[h] + (sums[2 * h] + sums[2 * h + 1]);
}

#include "nvidia/prefill_copies.cl"

// ---- a warp's 16 queries: rows lane / 4 and 8 further on ----

#define OUT_BYTES_f32 4
#define OUT_BYTES_f16 2
#define OUT_BYTES_bf16 2
#define WHOLE_STORES (CAT(OUT_BYTES_, OUT) == 2)  // 16 bytes per lane
// Like narrow_f16, in a single instruction known to every driver that takes tensor maps.
inline uint narrow_output_f16(const float a, const float b) {
    uint u;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(u) : "f"(b), "f"(a));
    return u;
}
#define narrow_output_bf16 narrow_bf16
// Word j in lane i of each 4 becomes word i in lane j.
inline uint4 transposed_in_4(uint4 v, const int lane) {
    const bool odd = lane & 1, high = lane & 2;
    const uint a = shuffle_int(odd ? v.x : v.y, 1), b = shuffle_int(odd ? v.z : v.w, 1);
    v = odd ? (uint4)(a, v.y, b, v.w) : (uint4)(v.x, a, v.z, b);
    const uint c = shuffle_int(high ? v.x : v.z, 2), d = shuffle_int(high ? v.y : v.w, 2);
    return high ? (uint4)(c, d, v.z, v.w) : (uint4)(v.x, v.y, c, d);
}

// Writes output and lse for the lane's rows t and t + 8, and resets their states.
inline void write_rows(float acc[OUT_COLUMNS / 2], float m[2], float l[2], __global void* out, __global float* lse, const int batch,
                       const int head, const int t_first, const int n, const int lane MAX_SCORES_PARAM SINKS_PARAM) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float sum = l[h] + shuffle_xor(l[h], 1);
        sum += shuffle_xor(sum, 2);
        const int t = t_first + 8 * h;
        const float norm = OUTPUT_NORM(m[h] * (EXPONENT_SCALE / LOG2E), sum, head);
#if WHOLE_STORES
        __global CAT(OUT, _t)* y = (__global CAT(OUT, _t)*)out + output_of(batch, head, min(t, n - 1), n, N_Q_HEADS) + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < OUT_COLUMNS / 32; ++i) {
            uint4 words;  // the lane's columns in each of 4 times 8, then 8 neighbouring columns
            words.x = CAT(narrow_output_, OUT)(acc[16 * i + 2 * h] * norm, acc[16 * i + 2 * h + 1] * norm);
            words.y = CAT(narrow_output_, OUT)(acc[16 * i + 4 + 2 * h] * norm, acc[16 * i + 5 + 2 * h] * norm);
            words.z = CAT(narrow_output_, OUT)(acc[16 * i + 8 + 2 * h] * norm, acc[16 * i + 9 + 2 * h] * norm);
            words.w = CAT(narrow_output_, OUT)(acc[16 * i + 12 + 2 * h] * norm, acc[16 * i + 13 + 2 * h] * norm);
            words = transposed_in_4(words, lane);
            if (t < n && i * 32 + lane % 4 * 8 < WIDTH) *(__global uint4*)(y + i * 32) = words;
        }
#else
        if (t < n) {
            __global CAT(OUT, _t)* y = (__global CAT(OUT, _t)*)out + output_of(batch, head, t, n, N_Q_HEADS) + 2 * (lane % 4);
#pragma unroll
            for (int i = 0; i < WIDTH / 8; ++i)
                CAT(store_pair_, OUT)(y + i * 8, acc[4 * i + 2 * h] * norm, acc[4 * i + 2 * h + 1] * norm);
        }
#endif
#if LSE
        if (t < n && lane % 4 == 0)
            lse[((size_t)batch * N_Q_HEADS + head) * n + t] = LOG_SUM(m[h] * (EXPONENT_SCALE / LOG2E), sum, head);
#endif
        if (t < n && lane % 4 == 0) KEEP_MAX_SCORE(((size_t)batch * N_Q_HEADS + head) * n + t, m[h] * (EXPONENT_SCALE / LOG2E));
        m[h] = -INFINITY;
        l[h] = 0.0f;
    }
}
#define WRITE(it, t) write_rows(acc, m, l, out, lse, batch, (it).head, t, END_OF(it), lane MAX_SCORES_ARG SINKS_ARG)

__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1)))
void attention_prefill(__global const QUERY_T* queries, __global const int* state, __global const CAT(KV, _t)* k_cache,
                       __global const CAT(KV, _t)* v_cache, __global void* out, __global float* lse,
                       __global const int* ranges, __global char* tensor_maps MAX_SCORES_PARAM SINKS_PARAM MOD_PARAMS) {
    __local uint4 __attribute__((aligned(1024))) buffers[(BLOCK_M * HEAD_DIM * 2 + 2 * STAGES * TILE_BYTES) / 16];
    __local ulong mbarriers[4 * STAGES + 4];
    __local tile tiles[STAGES];
    const uint qs = local_address(buffers), ks = qs + BLOCK_M * HEAD_DIM * 2, vs = ks + STAGES * TILE_BYTES;
    // Barriers per stage: keys and values full, and empty.
    const uint k_full = local_address(mbarriers), k_empty = k_full + 8 * STAGES, v_full = k_empty + 8 * STAGES;
    const uint v_empty = v_full + 8 * STAGES, q_full = v_empty + 8 * STAGES, q_empty = q_full + 16;  // for two warpgroups
    __local uint4 __attribute__((aligned(128))) map_fields[N_MAPS * TENSOR_MAP_BYTES / 16];
    const uint fields = local_address(map_fields);
    const int lane = get_local_id(0) % WARP, warp = get_local_id(0) / WARP;
    const int position = state[STATE_POSITION], n = state[STATE_N_TOKENS];
    const int batch = get_group_id(2);
    if (get_local_id(0) == 0)
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(k_full + 8 * i, COPY_ARRIVALS);
            mbarrier_init(v_full + 8 * i, COPY_ARRIVALS);
            mbarrier_init(k_empty + 8 * i, CONSUMER_WARPS);
            mbarrier_init(v_empty + 8 * i, CONSUMER_WARPS);
        }
    if (get_local_id(0) < 2) {
        mbarrier_init(q_full + 8 * get_local_id(0), 1);
        mbarrier_init(q_empty + 8 * get_local_id(0), CONSUMER_WARPS / 2);
    }
    local_fence_async();
    barrier(CLK_LOCAL_MEM_FENCE);

    if (warp >= CONSUMER_WARPS) {
        WGMMA_FEWER_REGISTERS(FEWER_REGISTERS);
        if (warp == CONSUMER_WARPS + COPY_WARPS) {
            const copy_place to = {qs, q_full, q_empty};
            copy_queries(to, state, queries, ranges, batch, lane, tensor_maps, fields);
        }
        const copy_place keys = {ks, k_full, k_empty}, values = {vs, v_full, v_empty};
        copy_tiles(keys, values, tiles, state, k_cache, v_cache, ranges, batch, warp - CONSUMER_WARPS, lane,
                   tensor_maps, fields MOD_ARGS);
        return;
    }

    WGMMA_MORE_REGISTERS(MORE_REGISTERS);
    const int team = warp / 4, column = 2 * (lane % 4);  // the lane's first of two columns in every 8
#define ROWS_BARRIER (1 + team)
    const uint q_low = OPERAND_LOW(qs + team * (64 * HEAD_DIM * 2), 16);
#define Q_OPERAND(i) OPERAND(q_low + (i) / 4 * (64 * 128 / 16) + (i) % 4 * 2, 1024, ROWS_128)
    const uint k_low = OPERAND_LOW(ks, 16);
#define K_OPERAND(at, i) \
    OPERAND(k_low + (at) * (TILE_BYTES / 16) + (i) / 4 * (BLOCK_N * 128 / 16) + (i) % 4 * 2, 1024, ROWS_128)
    const uint v_low = OPERAND_LOW(vs, BLOCK_N * 128);
#define V_OPERAND(at, i) OPERAND(v_low + (at) * (TILE_BYTES / 16) + (i) * 128, 1024, SWIZZLE_128)
    float s[BLOCK_N / 2], acc[OUT_COLUMNS / 2], m[2], l[2], shrink[2];
    uint4 p[BLOCK_N / 16];
    uint q_parity = 0;
// Waits for an item's queries; and releases the queries after all of the item's scores.
#define TAKE_QUERIES                              \
    mbarrier_wait(q_full + 8 * team, q_parity); \
    q_parity ^= 1
#define RETURN_QUERIES(done) \
    if ((done) && lane == 0) mbarrier_arrive(q_empty + 8 * team)

#define KEY_STEP(i) "l"(Q_OPERAND(i)), "l"(K_OPERAND(of_stage, i))
#define MULTIPLY_KEYS(at)                 \
    {                                     \
        const int of_stage = at;          \
        KEYS_BY_QUERIES(KV, s, KEY_STEP); \
    }
#define VALUE_STEP(i) FRAGMENTS_STEP(p[i], V_OPERAND(of_stage, i))
#define MULTIPLY_VALUES_OF(at)                \
    {                                         \
        const int of_stage = at;              \
        MULTIPLY_VALUES(KV, acc, VALUE_STEP); \
    }
#define SETTLE_SCORES \
    _Pragma("unroll") for (int i = 0; i < BLOCK_N / 2; i += 32) WGMMA_SETTLE32(s, i)
#define SETTLE_OUTPUT \
    _Pragma("unroll") for (int i = 0; i < OUT_COLUMNS / 2; i += 16) WGMMA_SETTLE16(acc, i)

    item it = TAKE(0);
    if (it.t0 < 0) return;
    int stage = 0;
    uint parity = 0;
    TAKE_QUERIES;
    m[0] = m[1] = -INFINITY;
    l[0] = l[1] = 0.0f;
    mbarrier_wait(k_full, 0);
    wgmma_fence();
    MULTIPLY_KEYS(0);
    WGMMA_WAIT(0);
    SETTLE_SCORES;
    for (int turn = 1;; ++turn) {
        // The scores for the item's first keys are complete.
        const item present = it;
        const int t_first = present.t0 + warp * 16 + lane / 4;
        const int rows[2] = {POSITION_OF(present) + min(t_first, END_OF(present) - 1),
                             POSITION_OF(present) + min(t_first + 8, END_OF(present) - 1)};
        const int first_row = POSITION_OF(present) + present.t0 + warp * 16;
        const int sequence = batch + MOD_SEQUENCE(STATE_OF(present));
        it = TAKE(turn);  // requested before it is needed
        tile keys = tiles[stage];
#pragma unroll
        for (int i = 0; i < OUT_COLUMNS / 2; ++i) acc[i] = 0.0f;  // while no product is running
        if (lane == 0) mbarrier_arrive(k_empty + 8 * stage);
        RETURN_QUERIES(keys.last);
        row_terms terms = TERMS_OF(keys);
        mask_scores(s, terms, keys, sequence, present.head, rows, column, first_row MOD_ARGS);
        update_softmax(s, terms, m, l, shrink);
        narrow_weights(p, s);
        while (!keys.last) {
            const int next_stage = stage + 1 == STAGES ? 0 : stage + 1;
            const uint next_parity = stage + 1 == STAGES ? parity ^ 1 : parity;
            mbarrier_wait(k_full + 8 * next_stage, next_parity);
            keys = tiles[next_stage];
            mbarrier_wait(v_full + 8 * stage, parity);
            wgmma_fence();
            MULTIPLY_KEYS(next_stage);
            MULTIPLY_VALUES_OF(stage);
            terms = TERMS_OF(keys);
            WGMMA_WAIT(1);
            SETTLE_SCORES;
            if (lane == 0) mbarrier_arrive(k_empty + 8 * next_stage);
            RETURN_QUERIES(keys.last);
            mask_scores(s, terms, keys, sequence, present.head, rows, column, first_row MOD_ARGS);
            update_softmax(s, terms, m, l, shrink);
            store_if_negative(l[0] + l[1], qs);
            WGMMA_WAIT(0);
            SETTLE_OUTPUT;
            if (lane == 0) mbarrier_arrive(v_empty + 8 * stage);
            if (warp_any(shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
                for (int i = 0; i < OUT_COLUMNS / 2; ++i) acc[i] *= shrink[i / 2 % 2];
            }
            narrow_weights(p, s);
            stage = next_stage;
            parity = next_parity;
        }
        // The last values, and the next item's first keys.
        const int v_stage = stage;
        mbarrier_wait(v_full + 8 * stage, parity);
        wgmma_fence();
        MULTIPLY_VALUES_OF(v_stage);
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
        if (it.t0 < 0) {
            WGMMA_WAIT(0);
            SETTLE_OUTPUT;
            WRITE(present, t_first);
            return;
        }
        TAKE_QUERIES;
        mbarrier_wait(k_full + 8 * stage, parity);
        wgmma_fence();
        MULTIPLY_KEYS(stage);
        WGMMA_WAIT(1);
        SETTLE_OUTPUT;
        if (lane == 0) mbarrier_arrive(v_empty + 8 * v_stage);
        WRITE(present, t_first);
        WGMMA_WAIT(0);
        SETTLE_SCORES;
    }
}

// Flash attention for the tokens of a step on the matrix units of Hopper GPUs, by asynchronous warpgroup products (wgmma).
// Formula and arguments as in cpu/attention_prefill.cl; queries and softmax weights are rounded to the 16-bit type of keys and
// values, sums are float32. Source: Shah et al., "FlashAttention-3" (2024): the next keys' scores are computed during the product
// with the current values, and one warpgroup's softmax overlaps with the other's products.
//
// Each work-group stays on a compute unit and takes one item after the other: BLOCK_M = 128 query rows of one head. Two warpgroups
// have 64 rows each; a row's scores, weights and output stay in a warp's registers. A third warpgroup copies keys and values,
// BLOCK_N = 128 keys per tile, into STAGES buffers each in local memory. It copies the next item's data while the others write an
// item's output, and it alone asks which tiles a mask hides.
//
//            local memory:  Q  8 rows x 8 columns a block, [16][HEAD_DIM / 8][8][8]              (NO_SWIZZLE in wgmma.cl)
//                           K  key tile i, dimension d at (i HEAD_DIM + d) 32, halves exchanged  (SWIZZLE_32)
//                           V  columns 64 c to 64 c + 63 of key j at (BLOCK_N c + j) 128                     (SWIZZLE_128)
//
// nvidia/attention_prefill_arrays_wgmma.cl does the same for arrays, read in place.
//
// Index space: groups (any number, 1, batch) with 384 work-items; each group takes items in turns, the longest rows first. With
// ORDER (an expression; needs KV_BLOCK_RANGES) the items are block N_Q_HEADS + head in ranges[ORDER ..].
// Build: KV (f16 or bf16), HEAD_DIM (64 or 128), N_KV_HEADS, constants for query_address.cl, CAPACITY (a multiple of 64), SCALE,
// KV_BLOCK_RANGES, LSE, BLOCK_M (128), BLOCK_N (128), DV_TILE (HEAD_DIM). With PACKED_OUT (one batch, tokens first) out is OUT (f16
// or bf16) [ceil(n/128) 16][N_Q_HEADS HEAD_DIM / 8][8][8], the next product's input (pack_activations.cl).
// Local memory: 256 HEAD_DIM (1 + 2 STAGES) bytes and a little. For pages of keys and values see kv_address.cl, for runs of several
// sequences query_block.cl.
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
#include "nvidia/key_tiles.cl"
#include "nvidia/quick_exponent.cl"
#undef HAS_KEY_SLOPE  // the rows have no bias here
#include "nvidia/fragment_scores.cl"
#include "nvidia/attention_arrays.cl"
#include "common/query_block.cl"

#ifndef OUT
#define OUT f32
#endif
#define STAGES 2
#define CONSUMER_WARPS 8
#define PRODUCER_WARPS 4
#define MORE_REGISTERS 232  // per consumer work-item; with the producers' FEWER_REGISTERS, all of a compute unit's
#define FEWER_REGISTERS 40
#define GROUP_ITEMS ((CONSUMER_WARPS + PRODUCER_WARPS) * WARP)
#define TILE_BYTES (BLOCK_N * HEAD_DIM * 2)
#define PART_KEYS (BLOCK_N * 2 / PRODUCER_WARPS)  // keys per tile copied by a warp; at most 64, so they lie in a single page
#define COPY_ROWS (256 / HEAD_DIM)  // rows copied at once by a warp
#if HEAD_DIM == 128
#define MULTIPLY_VALUES WGMMA_FRAGMENTS_128
#else
#define MULTIPLY_VALUES WGMMA_FRAGMENTS_64
#endif
// The unit of scores in the matrix units' sums: without a score_mod, scores only need the exponential's factor.
#define SCALED_FIRST (HAS_SCORE_MOD || !(SCALE > 0.0f))
#define EXPONENT_SCALE (SCALED_FIRST ? LOG2E : (float)(SCALE)*LOG2E)

#include "nvidia/prefill_items.cl"

// Masks and modifies a tile's scores, in units of EXPONENT_SCALE.
inline void mask_scores(float s[BLOCK_N / 2], const tile t, const int sequence, const int head, const int rows[2], const int column,
                        const int first_row MOD_PARAMS) {
    const bool whole = t.seen_as == TILE_FULL && (KV_BLOCK_RANGES ? t.n_keys == BLOCK_N : t.first + BLOCK_N <= first_row + 1);
    if (!HAS_SCORE_MOD && SCALED_FIRST) {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) s[i] *= (float)(SCALE);
    }
    if (!HAS_SCORE_MOD && whole) return;
    modify_scores(s, BLOCK_N / 2, terms_of(1.0f, sequence, head, rows, 0 MOD_ARGS), (float)(SCALE)*SCORE_UNIT, SCORE_FACTOR, sequence,
                  head, rows, t.first + column, t.first + t.n_keys, t.seen_as, whole MOD_ARGS);
}

// Turns scores into softmax weights, updates m and l for the lane's two rows (l: its columns only), and sets `shrink`, the factor
// for the output so far.
inline void update_softmax(float s[BLOCK_N / 2], float m[2], float l[2], float shrink[2]) {
    float top[4] = {m[0], m[1], s[1], s[3]}, from[2], sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < BLOCK_N / 8; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            top[h] = fmax(top[h], s[4 * i + 2 * h]);
            top[2 + h] = fmax(top[2 + h], s[4 * i + 2 * h + 1]);
        }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        top[h] = fmax(top[h], top[2 + h]);
        top[h] = fmax(top[h], shuffle_xor(top[h], 1));
        top[h] = fmax(top[h], shuffle_xor(top[h], 2));
        from[h] = top[h] == -INFINITY ? 0.0f : top[h] * EXPONENT_SCALE;  // a row without keys so far
        shrink[h] = exp2_quick(m[h] * EXPONENT_SCALE - from[h]);
        m[h] = top[h];
    }
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) {
        s[i] = exp2_quick(fma(s[i], EXPONENT_SCALE, -from[i / 2 % 2]));
        sums[i % 4] += s[i];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) l[h] = l[h] * shrink[h] + (sums[2 * h] + sums[2 * h + 1]);
}

// ---- a warp's copies ----

// Copies PART_KEYS rows with HEAD_DIM values, `stride` values apart, to row 0's place, in the layouts ROWS_128 and SWIZZLE_128.
// Rows past the end become zero, because a weight of 0 times the memory's content there must be 0.
inline void copy_rows(const uint to, __global const CAT(KV, _t)* from, const int stride, const int n_rows, const int lane) {
    const int first = lane / (HEAD_DIM / 8), c = lane % (HEAD_DIM / 8);
    const uint to_column = to + c / 8 * (BLOCK_N * 128) + first * 128;
    __global const CAT(KV, _t)* from_column = from + (long)first * stride + c * 8;
    const int place = (c ^ first) & 7, left = n_rows - first;
#pragma unroll
    for (int i = 0; i < PART_KEYS / COPY_ROWS; ++i)
        copy16_async(to_column + i * COPY_ROWS * 128 + (place ^ (i * COPY_ROWS & 7)) * 16,
                     from_column + (long)opaque(stride) * (i * COPY_ROWS), i * COPY_ROWS < left);
}

// Copies PART_KEYS keys from a cache's tiles, in the layout SWIZZLE_32. Tiles without any key need not exist.
inline void copy_key_tiles(const uint to, __global const CAT(KV, _t)* from, const int n_keys, const int lane) {
    const uint to_piece = to + (lane ^ ((lane >> 3) & 1)) * 16;
#pragma unroll
    for (int i = 0; i < PART_KEYS * HEAD_DIM / 256; ++i)
        copy16_async(to_piece + i * 512, from + lane * 8 + i * 256, i / (HEAD_DIM / 16) * 16 < n_keys);
}

// ---- a warp's 16 queries: rows lane / 4 and 8 further on in float32, or 8 rows x 4 pieces of 16 bytes at once, in memory order ----

#define QUERY_WORDS (HEAD_DIM / 4)
inline void load_queries(uint q[QUERY_WORDS], __global const float* queries, __global const int* state, const int batch,
                         const item it, const int first, const int n, const int lane) {
    queries += first_query(batch, it.head, n, N_Q_HEADS, Q_STRIDE) + 2 * (lane % 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        __global const float2* from = (__global const float2*)(queries + (size_t)min(first + 8 * h + lane / 4, n - 1) * Q_STRIDE);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i) {
            const float2 v = from[4 * i];
            q[h * (HEAD_DIM / 8) + i] = CAT(narrow_, KV)(v.x, v.y);
        }
    }
}
inline void put_queries(const uint to, const uint q[QUERY_WORDS], const int lane) {
#pragma unroll
    for (int i = 0; i < QUERY_WORDS; ++i) store4_local(to + i * 128 + lane * 4, q[i]);  // a block has 128 bytes
}

// Writes output and lse for the lane's rows t and t + 8, and resets their states.
inline void write_rows(float acc[HEAD_DIM / 2], float m[2], float l[2], __global void* out, __global float* lse, const int batch,
                       const int head, const int t_first, const int n, const int lane MAX_SCORES_PARAM SINKS_PARAM) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float sum = l[h] + shuffle_xor(l[h], 1);
        sum += shuffle_xor(sum, 2);
        const int t = t_first + 8 * h;
        const float norm = OUTPUT_NORM(m[h] * (EXPONENT_SCALE / LOG2E), sum, head);
        if (t < n) {
#if PACKED_OUT
            const size_t block = (size_t)(t / 8) * (N_Q_HEADS * HEAD_DIM / 8) + head * (HEAD_DIM / 8);
            __global uint* y = (__global uint*)out + block * WARP + t % 8 * 4 + lane % 4;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; ++i)
                y[i * WARP] = CAT(narrow_, OUT)(acc[4 * i + 2 * h] * norm, acc[4 * i + 2 * h + 1] * norm);
#else
            __global CAT(OUT, _t)* y = (__global CAT(OUT, _t)*)out + output_of(batch, head, t, n, N_Q_HEADS) + 2 * (lane % 4);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; ++i)
                CAT(store_pair_, OUT)(y + i * 8, acc[4 * i + 2 * h] * norm, acc[4 * i + 2 * h + 1] * norm);
#endif
        }
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

#define QUERY_T float
__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1)))
void attention_prefill(__global const QUERY_T* queries, __global const int* state, __global const CAT(KV, _t)* k_cache,
                       __global const CAT(KV, _t)* v_cache, __global void* out, __global float* lse,
                       __global const int* ranges MAX_SCORES_PARAM SINKS_PARAM MOD_PARAMS) {
    __local uint4 __attribute__((aligned(1024))) buffers[(BLOCK_M * HEAD_DIM * 2 + 2 * STAGES * TILE_BYTES) / 16];
    __local ulong mbarriers[4 * STAGES];
    __local tile tiles[STAGES];
    const uint qs = local_address(buffers), ks = qs + BLOCK_M * HEAD_DIM * 2, vs = ks + STAGES * TILE_BYTES;
    // Barriers per stage: keys and values full, and empty.
    const uint k_full = local_address(mbarriers), k_empty = k_full + 8 * STAGES, v_full = k_empty + 8 * STAGES;
    const uint v_empty = v_full + 8 * STAGES;
    const int lane = get_local_id(0) % WARP, warp = get_local_id(0) / WARP;
    const int position = state[STATE_POSITION], n = state[STATE_N_TOKENS];
    const int batch = get_group_id(2);
    if (get_local_id(0) == 0)
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(k_full + 8 * i, PRODUCER_WARPS / 2 * WARP);
            mbarrier_init(v_full + 8 * i, PRODUCER_WARPS / 2 * WARP);
            mbarrier_init(k_empty + 8 * i, CONSUMER_WARPS);
            mbarrier_init(v_empty + 8 * i, CONSUMER_WARPS);
        }
    barrier(CLK_LOCAL_MEM_FENCE);

    if (warp >= CONSUMER_WARPS) {
        WGMMA_FEWER_REGISTERS(FEWER_REGISTERS);
        const bool of_keys = warp < CONSUMER_WARPS + PRODUCER_WARPS / 2;  // otherwise values
        const int part = warp % (PRODUCER_WARPS / 2) * PART_KEYS;
        const int row_stride = of_keys ? ROW_STRIDE(KEYS) : ROW_STRIDE(VALUES);
        const uint to = (of_keys ? ks : vs) + part * (of_keys ? HEAD_DIM * 2 : 128);
        const uint full = of_keys ? k_full : v_full, empty = of_keys ? k_empty : v_empty;
        int stage = 0;
        uint parity = 1;
        item next_item = TAKE(0);
        for (int turn = 1; next_item.t0 >= 0; ++turn) {
            const item it = next_item;
            next_item = TAKE(turn);  // requested before it is needed
            const int kv_head = it.head / (N_Q_HEADS / N_KV_HEADS);
            __global const CAT(KV, _t)* from = of_keys ? k_cache : v_cache;
            from += of_keys ? first_row(KEYS, batch, kv_head) : first_row(VALUES, batch, kv_head);
            const int end = POSITION_OF(it) + min(it.t0 + BLOCK_M, END_OF(it));
            const int2 group_rows = (int2)(POSITION_OF(it) + it.t0, end - 1);
            const int sequence = batch + MOD_SEQUENCE(STATE_OF(it));
            kv_block_ranges left = RANGES_OF(sequence, it.head, it.t0 / BLOCK_M, group_rows, end);
            tile_coord at = {0, (int2)(0)};
            at = tile_after(at, &left, sequence, it.head, group_rows MOD_ARGS);
            int last;
            do {  // at least once, even without a key: the consumers wait for a tile
                const int n_keys = at.range.y > 0 ? min(BLOCK_N, at.range.y - at.j) : 0;
                const int row = n_keys > part ? kv_row(STATE_OF(it), at.j + part) : 0;
                tile_coord next = at;
                if (n_keys > 0) next = tile_after(at, &left, sequence, it.head, group_rows MOD_ARGS);
                last = n_keys == 0 || next.range.y == 0;
                mbarrier_wait(empty + 8 * stage, parity);
                if (warp == CONSUMER_WARPS && lane == 0) {
                    tiles[stage].first = at.j;
                    tiles[stage].n_keys = n_keys;
                    tiles[stage].seen_as = n_keys > 0 ? class_of(at, sequence, it.head, group_rows MOD_ARGS) : TILE_PARTIAL;
                    tiles[stage].last = last;
                }
                if (of_keys)
                    copy_key_tiles(to + stage * TILE_BYTES, from + (size_t)row * HEAD_DIM, n_keys - part, lane);
                else
                    copy_rows(to + stage * TILE_BYTES, from + (size_t)row * row_stride, row_stride, n_keys - part, lane);
                COPY_WAIT_ALL;
                local_fence_async();
                mbarrier_arrive(full + 8 * stage);
                at = next;
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
            } while (!last);
        }
        return;
    }

    WGMMA_MORE_REGISTERS(MORE_REGISTERS);
    const int team = warp / 4, column = 2 * (lane % 4);  // the lane's first of two columns in every 8
#define ROWS_BARRIER (1 + team)
    const uint q_low = OPERAND_LOW(qs + team * (64 * HEAD_DIM * 2), 128);
#define Q_OPERAND(i) OPERAND(q_low + (i) * 16, HEAD_DIM * 16, NO_SWIZZLE)
    const uint k_low = OPERAND_LOW(ks, HEAD_DIM * 32);
#define K_OPERAND(at, i) OPERAND(k_low + (at) * (TILE_BYTES / 16) + (i) * 32, 256, SWIZZLE_32)
#define MULTIPLY_KEYS_NEW WGMMA_128_NEW
#define MULTIPLY_KEYS_MORE WGMMA_128
    const uint v_low = OPERAND_LOW(vs, BLOCK_N * 128);
#define V_OPERAND(at, i) OPERAND(v_low + (at) * (TILE_BYTES / 16) + (i) * 128, 1024, SWIZZLE_128)
    float s[BLOCK_N / 2], acc[HEAD_DIM / 2], m[2], l[2], shrink[2];
    uint4 p[BLOCK_N / 16];
    uint q[QUERY_WORDS];
    const uint q_to = qs + warp * 2 * HEAD_DIM * 16;

#define MULTIPLY_KEYS(at)                                             \
    MULTIPLY_KEYS_NEW(KV, s, Q_OPERAND(0), K_OPERAND(at, 0));         \
    _Pragma("unroll") for (int i = 1; i < HEAD_DIM / 16; ++i)         \
        MULTIPLY_KEYS_MORE(KV, s, Q_OPERAND(i), K_OPERAND(at, i), 1); \
    wgmma_commit()
#define MULTIPLY_VALUES_OF(at)                               \
    _Pragma("unroll") for (int i = 0; i < BLOCK_N / 16; ++i) \
        MULTIPLY_VALUES(KV, acc, p[i], V_OPERAND(at, i), 1); \
    wgmma_commit()
#define SETTLE_SCORES     \
    WGMMA_SETTLE32(s, 0); \
    WGMMA_SETTLE32(s, 32)
#if HEAD_DIM == 128
#define SETTLE_OUTPUT       \
    WGMMA_SETTLE32(acc, 0); \
    WGMMA_SETTLE32(acc, 32)
#else
#define SETTLE_OUTPUT WGMMA_SETTLE32(acc, 0)
#endif

    item it = TAKE(0);
    if (it.t0 < 0) return;
    int stage = 0;
    uint parity = 0;
    load_queries(q, queries, state, batch, it, it.t0 + warp * 16, END_OF(it), lane);
    put_queries(q_to, q, lane);
    local_fence_async();
    named_barrier(ROWS_BARRIER, WARPGROUP);
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
        it = TAKE(turn);  // requested before it is needed
        tile keys = tiles[stage];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) acc[i] = 0.0f;  // while no product is running
        if (lane == 0) mbarrier_arrive(k_empty + 8 * stage);
        mask_scores(s, keys, batch + MOD_SEQUENCE(STATE_OF(present)), present.head, rows, column, first_row MOD_ARGS);
        update_softmax(s, m, l, shrink);
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
            WGMMA_WAIT(1);
            SETTLE_SCORES;
            if (lane == 0) mbarrier_arrive(k_empty + 8 * next_stage);
            mask_scores(s, keys, batch + MOD_SEQUENCE(STATE_OF(present)), present.head, rows, column, first_row MOD_ARGS);
            update_softmax(s, m, l, shrink);
            WGMMA_WAIT(0);
            SETTLE_OUTPUT;
            if (lane == 0) mbarrier_arrive(v_empty + 8 * stage);
            if (warp_any(shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 2; ++i) acc[i] *= shrink[i / 2 % 2];
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
        load_queries(q, queries, state, batch, it, it.t0 + warp * 16, END_OF(it), lane);
        named_barrier(ROWS_BARRIER, WARPGROUP);  // all of the team's products with the previous queries are complete
        put_queries(q_to, q, lane);
        local_fence_async();
        named_barrier(ROWS_BARRIER, WARPGROUP);
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

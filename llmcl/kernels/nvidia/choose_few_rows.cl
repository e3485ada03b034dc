// Chooses experts for the few tokens of a step, and groups tokens by expert, as a link in nvidia/few_rows_chain.cl: does the work
// of portable/choose_experts.cl and portable/group_by_expert.cl (see their formulas) in a single work-group.
//
//   logits[t] = sum_p parts[p][t] (+ bias)
//
// parts   float [PARTS][MAX_ROWS][ROW]: from nvidia/router_few_rows.cl, written by other groups in the launch
// weights float [n][TOP_K]     order  int [n TOP_K]     blocks  int4, existing blocks only, at most BLOCK_ROWS slots each
//
// A warp has a token, a lane every 32nd expert.
// Build: N_EXPERTS, ROW, TOP_K (at most 32), RENORMALIZE, PARTS, MAX_ROWS, BLOCK_ROWS, WARPS, with or without BIAS.
// Local memory: 4 (MAX_ROWS TOP_K + 3 N_EXPERTS + 1) bytes.
#if !defined(N_EXPERTS) || !defined(ROW) || !defined(TOP_K) || !defined(RENORMALIZE) || !defined(PARTS) || !defined(MAX_ROWS) || \
    !defined(BLOCK_ROWS) || !defined(WARPS)
#error "nvidia/choose_few_rows.cl needs the build constants named in its head"
#endif
#include "common/common.cl"
#include "common/expert_bias.cl"
#include "common/float_order.cl"
#include "nvidia/ptx.cl"

#define EACH ((N_EXPERTS + WARP - 1) / WARP)

// Chooses a token's experts, largest logit first: lane s gets the s-th expert and its weight.
inline int choose_of(const float logits[EACH], const int lane, float* weight) {
    uint left = 0;  // a bit per expert of the lane that is not chosen yet
#pragma unroll
    for (int i = 0; i < EACH; ++i) left |= i * WARP + lane < N_EXPERTS ? 1u << i : 0;
    int id = 0;
    float mine = 0.0f, largest = 0.0f;
    for (int s = 0; s < TOP_K; ++s) {
        uint best = 0;
        int first = N_EXPERTS;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const uint order = order_of(logits[i]);
            const bool better = left >> i & 1 && (first == N_EXPERTS || order > best);
            best = better ? order : best;
            first = better ? i * WARP + lane : first;
        }
        const uint top = warp_max_uint(first < N_EXPERTS ? best : 0);
        const int chosen = (int)warp_min_uint(first < N_EXPERTS && best == top ? (uint)first : N_EXPERTS);
        if (chosen % WARP == lane) left &= ~(1u << chosen / WARP);
        const float value = ordered_float(top);
        largest = s == 0 ? value : largest;
        id = lane == s ? chosen : id;
        mine = lane == s ? value : mine;
    }
    const float power = exp(mine - largest);
    float sum = lane < TOP_K ? power : 0.0f;
#if !RENORMALIZE
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum += i * WARP + lane < N_EXPERTS ? exp(logits[i] - largest) : 0.0f;
#endif
    *weight = power / warp_sum(sum);
    return id;
}

// Inclusive sums over the lanes.
inline int sum_until(int v, const int lane) {
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
        const int before = shuffle_int_from(v, max(lane - d, 0));
        v += lane >= d ? before : 0;
    }
    return v;
}

// memory: the group's local memory. done, count: see few_rows_unit in nvidia/linear_few_rows.cl.
inline void choose_unit(__local int* memory, volatile __global const uint* done, const uint count, __global const float* parts,
                        __global float* weights, __global int* order, __global int4* blocks, __global const int* state BIAS_PARAM) {
    __local int* ids = memory;                        // [MAX_ROWS TOP_K]
    __local int* counts = ids + MAX_ROWS * TOP_K;     // [N_EXPERTS], slots
    __local int* firsts = counts + N_EXPERTS;         // [N_EXPERTS] first index in order, and the number of blocks
    __local int* first_blocks = firsts + N_EXPERTS + 1;  // [N_EXPERTS]
    const int item = get_local_id(0), lane = item % WARP, warp = item / WARP, n = state[STATE_N_TOKENS], items = WARP * WARPS;
    float add[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
#if BIAS
        add[i] = bias[min(i * WARP + lane, N_EXPERTS - 1)];
#else
        add[i] = 0.0f;
#endif
    }
    for (int e = item; e < N_EXPERTS; e += items) counts[e] = 0;
    wait_until(done, count);
    for (int token = warp; token < n; token += WARPS) {
        float logits[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            float v[PARTS];
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
                v[p] = load_shared_float(parts + ((size_t)p * MAX_ROWS + token) * ROW + min(i * WARP + lane, N_EXPERTS - 1));
            logits[i] = add[i];
#pragma unroll
            for (int p = 0; p < PARTS; ++p) logits[i] += v[p];
        }
        float weight;
        const int id = choose_of(logits, lane, &weight);
        if (lane < TOP_K) {
            weights[token * TOP_K + lane] = weight;
            ids[token * TOP_K + lane] = id;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    int rank[(MAX_ROWS * TOP_K + WARP * WARPS - 1) / (WARP * WARPS)];  // a slot's rank among the slots of its expert
#pragma unroll
    for (int i = 0; i * items < MAX_ROWS * TOP_K; ++i)
        if (i * items + item < n * TOP_K) rank[i] = atomic_inc(counts + ids[i * items + item]);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (warp == 0) {
        int first = 0, first_block = 0;
        for (int e = lane; e < EACH * WARP; e += WARP) {
            const int slots = e < N_EXPERTS ? counts[e] : 0, of_expert = (slots + BLOCK_ROWS - 1) / BLOCK_ROWS;
            const int until = sum_until(slots, lane), blocks_until = sum_until(of_expert, lane);
            if (e < N_EXPERTS) {
                firsts[e] = first + until - slots;
                first_blocks[e] = first_block + blocks_until - of_expert;
            }
            first += shuffle_int_from(until, WARP - 1);
            first_block += shuffle_int_from(blocks_until, WARP - 1);
        }
        if (lane == 0) firsts[N_EXPERTS] = first_block;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int e = item; e < N_EXPERTS; e += items)
        for (int taken = 0, b = first_blocks[e]; taken < counts[e]; taken += BLOCK_ROWS, ++b)
            blocks[b] = (int4)(e, firsts[e] + taken, min(BLOCK_ROWS, counts[e] - taken), b == 0 ? firsts[N_EXPERTS] : 0);
#pragma unroll
    for (int i = 0; i * items < MAX_ROWS * TOP_K; ++i)
        if (i * items + item < n * TOP_K) order[firsts[ids[i * items + item]] + rank[i]] = i * items + item;
}

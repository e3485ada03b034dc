// All layers of a decode step in one launch on an NVIDIA GPU: between `embed` and the output head.
//
//   for each layer:  qkv = W_qkv norm(x)  |  attend  |  x += W_o attended  |  ffn = gate(W_gate norm(x)) W_up norm(x)  |
//                    x += W_down ffn       | : a barrier of the whole grid
//
// The work of each phase is that of nvidia/linear_decode.cl and nvidia/attention_decode.cl, by the same functions and, with
// the same number of warps to a unit, with the same bits; the launches that it replaces are its twin.
//
// layers   ulong [N_LAYERS][8]: addresses of attention norm, W_qkv, K, V, W_o, MLP norm, W_gate_up, W_down, as
//          `store_addresses` leaves them
// x, qkv, attended, ffn, rope, part_ml, part_acc, state, arrivals   as in the separate kernels
// ticket   uint [1], 0 before and after: arrivals at the grid's barriers
//
// Index space: N_GROUPS groups of 32 WARPS work-items, which must all run at the same time: one for each compute unit.
// Build: that of nvidia/product.cl (nvidia/product_quantized.cl for quantised weights) and nvidia/attend.cl, and HIDDEN, FFN,
// N_LAYERS, N_GROUPS, WARPS (16), and the warps of a team in each product: QKV_TEAM, OUT_TEAM, GATE_TEAM, DOWN_TEAM (divisors
// of WARPS). Local memory: the larger of the two.
#if !defined(HIDDEN) || !defined(FFN) || !defined(N_LAYERS) || !defined(N_GROUPS) || !defined(QKV_TEAM) || \
    !defined(OUT_TEAM) || !defined(GATE_TEAM) || !defined(DOWN_TEAM)
#error "nvidia/decode_layers.cl needs the build constants named in its head"
#endif
#include "tiles.cl"
#include "nvidia/ptx.cl"
#if QUANTIZED
#include "nvidia/product_quantized.cl"
#else
#include "nvidia/product.cl"
#endif
#include "nvidia/attend.cl"

#define Q_SIZE (N_Q_HEADS * HEAD_DIM)
#if QUANTIZED
#define LARGEST(a, b) ((a) > (b) ? (a) : (b))
#define PRODUCTS_FLOATS PRODUCT_FLOATS(LARGEST(LARGEST(FFN, HIDDEN), Q_SIZE))
#else
#define PRODUCTS_FLOATS PRODUCT_FLOATS(WARPS)
#endif
#define SCRATCH_FLOATS (ATTEND_FLOATS > PRODUCTS_FLOATS ? ATTEND_FLOATS : PRODUCTS_FLOATS)
#define QKV_SIZE (Q_SIZE + 2 * N_KV_HEADS * HEAD_DIM)
#define BARRIERS (5 * N_LAYERS - 1)
#if QKV_SIZE % 16 || HIDDEN % 16 || FFN % 16
#error "nvidia/decode_layers.cl: sizes are multiples of 16"
#endif

// Waits until every group has come to its `nth` barrier, and sees what they wrote before.
inline void grid_barrier(__global uint* ticket, const uint nth) {
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (get_local_id(0) == 0) {  // its fences cover what the barriers order before and after them
        device_fence();
        atomic_inc(ticket);
        while (load_acquire(ticket) < nth * N_GROUPS) {}
        device_fence();
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
}

// A product, and before the barrier that it waits for the first weights that it needs: they do not depend on what the barrier
// orders, so the memory is busy while groups wait.
#define FIRST_UNIT(team) (group + warp / (team) * N_GROUPS)
#if QUANTIZED
#define UNIT_STRIDE(team) (N_GROUPS * (WARPS / (team)))
#define PREFETCH(weight, columns, units, gated, team)                                                           \
    load_turn(&turn, (__global const uchar*)(weight), columns, gated, units, FIRST_UNIT(team), UNIT_STRIDE(team), team, \
              warp % (team))
#define PRODUCT(weight, norm, from, to, columns, rows, gated, normed, add, team)                                           \
    product((__global const uchar*)(weight), from, (__global const float*)(norm), to, columns, rows, gated, normed, add,   \
            ((rows) + 15) / 16, FIRST_UNIT(team), UNIT_STRIDE(team), team, warp % (team), 1 + warp / (team), &turn, scratch)
#else
#define PREFETCH(weight, columns, units, gated, team)                                                                      \
    if (FIRST_UNIT(team) < (units))                                                                                        \
    load_turn(&turn, (__global const CAT(WEIGHT, _t)*)(weight) + UNIT_OFFSET(FIRST_UNIT(team), columns, gated), columns,   \
              gated, warp % (team) * RUN, (team) * RUN)
#define PRODUCT(weight, norm, from, to, columns, rows, gated, normed, add, team)                                       \
    product((__global const CAT(WEIGHT, _t)*)(weight), from, (__global const float*)(norm), to, columns, rows, gated,  \
            normed, add, ((rows) + 15) / 16, FIRST_UNIT(team), N_GROUPS * (WARPS / (team)), team, warp % (team),       \
            1 + warp / (team), &turn, true, scratch + warp / (team) * (team) * 66)
#endif

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void decode_layers(__global const ulong* layers, __global float* x, __global float* qkv, __global float* attended,
                   __global float* ffn, __global const float* rope, __global const int* state, __global float* part_ml,
                   __global float* part_acc, __global int* arrivals, __global uint* ticket MOD_PARAMS) {
    __local float __attribute__((aligned(16))) scratch[SCRATCH_FLOATS];
    __local int arrived;
    const int group = get_group_id(0), warp = get_local_id(0) / WARP, position = state[STATE_POSITION];
    uint nth = 0;
    weight_turn turn;
    PREFETCH(layers[1], HIDDEN, QKV_SIZE / 16, false, QKV_TEAM);
    for (int layer = 0; layer < N_LAYERS; ++layer) {
        __global const ulong* at = layers + layer * 8;
        PRODUCT(at[1], at[0], x, qkv, HIDDEN, QKV_SIZE, false, true, false, QKV_TEAM);
        grid_barrier(ticket, ++nth);
        if (group < N_KV_HEADS * N_SPLITS)
            attend(group / N_SPLITS, group % N_SPLITS, position, qkv, rope, state, (__global CAT(KV, _t)*)at[2],
                   (__global CAT(KV, _t)*)at[3], part_ml, part_acc, attended, arrivals, scratch, &arrived MOD_ARGS);
        PREFETCH(at[4], Q_SIZE, HIDDEN / 16, false, OUT_TEAM);
        grid_barrier(ticket, ++nth);
        PRODUCT(at[4], at[5], attended, x, Q_SIZE, HIDDEN, false, false, true, OUT_TEAM);
        PREFETCH(at[6], HIDDEN, FFN / 16, true, GATE_TEAM);
        grid_barrier(ticket, ++nth);
        PRODUCT(at[6], at[5], x, ffn, HIDDEN, FFN, true, true, false, GATE_TEAM);
        PREFETCH(at[7], FFN, HIDDEN / 16, false, DOWN_TEAM);
        grid_barrier(ticket, ++nth);
        PRODUCT(at[7], at[5], ffn, x, FFN, HIDDEN, false, false, true, DOWN_TEAM);
        if (layer == N_LAYERS - 1) break;
        PREFETCH(at[8 + 1], HIDDEN, QKV_SIZE / 16, false, QKV_TEAM);
        grid_barrier(ticket, ++nth);
    }
    // The last group to leave makes the ticket 0 again; nobody waits on it any more.
    if (get_local_id(0) == 0 && atomic_inc(ticket) == BARRIERS * N_GROUPS + N_GROUPS - 1) *ticket = 0;
}

// layers[layer] = the addresses of these buffers, which stay where they are.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void store_addresses(__global ulong* layers, const int layer, __global void* a, __global void* b, __global void* c,
                     __global void* d, __global void* e, __global void* f, __global void* g, __global void* h) {
    __global ulong* at = layers + layer * 8;
    at[0] = (ulong)a;
    at[1] = (ulong)b;
    at[2] = (ulong)c;
    at[3] = (ulong)d;
    at[4] = (ulong)e;
    at[5] = (ulong)f;
    at[6] = (ulong)g;
    at[7] = (ulong)h;
}

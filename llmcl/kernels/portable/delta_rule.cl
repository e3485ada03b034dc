// The gated delta rule (Yang et al., "Gated Delta Networks", 2024, equation 10), token by token. For each value head, with its key
// head's query and key:
//
//   S = decay S;   S += k (rate (v - S^T k))^T;   out = S^T q
//
// computed as  p = S^T k, r = S^T q with the old state;  d = rate (v - decay p);  out = decay r + d (k . q);  S = decay S + k d^T
// so that work-items, which share the rows of S, reduce once per token.
//
// Without CORRECTS it is Mamba-2's scan (Dao and Gu, "Transformers are SSMs", 2024), with C as q, B as k, x as v and the time step as
// rate:  d = rate v;  out = S^T q + skip v
//
// qkv     float [n][2 N_K D_K + N_V D_V]: q and k for N_K heads, v for N_V; without CORRECTS in the order v, k, q
// gates   float [n][N_V][2]: decay, rate        scalars  float [3][N_V], without CORRECTS: the last row has the skips
// state   int, see STATE_*; at position 0 the slot counts as 0     states float [slots][N_V][D_K][D_V]
// out     float [n][N_V][D_V]
//
//   S of a head    a group's columns: COLUMNS WIDTH
//                  +----------------+
//     part 0       | rows 0 ..      |  each work-item: D_K / PARTS rows of WIDTH columns, in registers for the whole step
//     part 1       |                |
//                  +----------------+
//
// Index space: groups (D_V / (COLUMNS WIDTH), N_V), local size COLUMNS PARTS, for up to SEGMENT consecutive tokens in one sequence, from
// `first` on; S after the tokens before a snapshot also goes into the snapshot's slot. With EACH_ALONE: groups (.., N_V, n), each row a
// separate sequence.
// Build: CORRECTS, N_K, N_V, D_K, D_V, COLUMNS, PARTS (divides D_K), WIDTH (lanes.cl), EACH_ALONE, SEGMENT, HEADS_IN_TURN (value head h has key
// head
// h % N_K; else value heads with the same key head are neighbours), step state constants.
// Local memory: 12 COLUMNS WIDTH PARTS bytes, none with a single part.
#if !defined(N_K) || !defined(N_V) || !defined(D_K) || !defined(D_V) || !defined(COLUMNS) || !defined(PARTS) || !defined(WIDTH) || \
    !defined(EACH_ALONE) || !defined(SEGMENT) || !defined(HEADS_IN_TURN) || !defined(STATE_RECURRENT) || !defined(STATE_SNAPSHOT)
#error "delta_rule.cl needs N_K, N_V, D_K, D_V, COLUMNS, PARTS, WIDTH, EACH_ALONE, SEGMENT, HEADS_IN_TURN, CORRECTS and slots of the state"
#endif
#include "common/common.cl"
#include "common/delta_row.cl"
#include "common/lanes.cl"
#include "common/step_rows.cl"

#define ROWS (D_K / PARTS)
#if WIDTH == 1
#define ROWS_IN_REGISTERS _Pragma("unroll")
#else
#define ROWS_IN_REGISTERS  // more than a CPU has: unrolling made Intel's compiler 4 to 7 times slower
#endif

__kernel __attribute__((reqd_work_group_size(COLUMNS * PARTS, 1, 1)))
void delta_rule(__global const float* qkv, __global const float* gates, __global const int* state, __global float* states,
                __global float* out, const int first SCALARS_PARAM) {
#if PARTS > 1
    __local lanes_t met_p[PARTS * COLUMNS], met_r[PARTS * COLUMNS], met_kq[PARTS * COLUMNS];
#endif
    const int lid = get_local_id(0), part = lid / COLUMNS, v = get_group_id(1);
    const int column = (get_group_id(0) * COLUMNS + lid % COLUMNS) * WIDTH;
    const int key_head = HEADS_IN_TURN ? v % N_K : v / (N_V / N_K);
    const int alone = EACH_ALONE ? (int)get_group_id(2) : 0;
    __global const int* of_row = sequence_state(state, alone);
    const int begin = EACH_ALONE ? alone : first;
    const int end = EACH_ALONE ? alone + 1 : min(first + SEGMENT, state[STATE_N_TOKENS]);
    if (begin >= end) return;  // the same for the whole group

    __global float* slot = states + (((size_t)of_row[STATE_RECURRENT] * N_V + v) * D_K + part * ROWS) * D_V + column;
    const bool has_past = of_row[STATE_POSITION] > 0 || first > 0;
    lanes_t s[ROWS];
    ROWS_IN_REGISTERS
    for (int i = 0; i < ROWS; ++i) {
        s[i] = 0;
        if (has_past) s[i] = load_lanes(slot + i * D_V);
    }
    const int cut = EACH_ALONE ? 0 : state[STATE_SNAPSHOT + 1];
    for (int t = begin, stop = begin < cut && cut < end ? cut : end; t < end; stop = end) {
        for (; t < stop; ++t) {
            __global const float* row = qkv + (size_t)t * CHANNELS;
            __global const float* q = row + FIRST_Q + key_head * D_K + part * ROWS;
            __global const float* k = row + FIRST_K + key_head * D_K + part * ROWS;
            const float decay = gates[((size_t)t * N_V + v) * 2], rate = gates[((size_t)t * N_V + v) * 2 + 1];
            const lanes_t value = load_lanes(row + FIRST_V + v * D_V + column);
            lanes_t p = 0, r = 0;
            float kq = 0;
            ROWS_IN_REGISTERS
            for (int i = 0; i < ROWS; ++i) {
#if CORRECTS
                p += s[i] * k[i];
#endif
                r += s[i] * q[i];
                kq += k[i] * q[i];
            }
#if PARTS > 1
            barrier(CLK_LOCAL_MEM_FENCE);
            met_p[lid] = p;
            met_r[lid] = r;
            met_kq[lid] = kq;
            barrier(CLK_LOCAL_MEM_FENCE);
            p = r = 0;
            kq = 0;
            for (int i = 0; i < PARTS; ++i) {
                p += met_p[i * COLUMNS + lid % COLUMNS];
                r += met_r[i * COLUMNS + lid % COLUMNS];
                kq += met_kq[i * COLUMNS + lid % COLUMNS];
            }
#endif
            const lanes_t d = (value - p * decay) * rate;  // without CORRECTS, p is 0
            ROWS_IN_REGISTERS
            for (int i = 0; i < ROWS; ++i) s[i] = s[i] * decay + d * k[i];
            lanes_t y = r * decay + d * kq;
#if !CORRECTS
            y += value * SKIP(v);
#endif
            if (part == 0) store_lanes(y, out + ((size_t)t * N_V + v) * D_V + column);
        }
        if (t != cut) continue;
        __global float* kept = slot + ((long)state[STATE_SNAPSHOT] - of_row[STATE_RECURRENT]) * (N_V * D_K * D_V);
        ROWS_IN_REGISTERS
        for (int i = 0; i < ROWS; ++i) store_lanes(s[i], kept + i * D_V);
    }
    ROWS_IN_REGISTERS
    for (int i = 0; i < ROWS; ++i) store_lanes(s[i], slot + i * D_V);
}

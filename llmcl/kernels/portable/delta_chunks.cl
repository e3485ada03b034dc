// The gated delta rule, chunk by chunk (formulas and names: delta_terms.cl). With S the state before a chunk:
//
//   d = u - w S;   out = g (S^T q) + b d;   S = g[last] S + k^T (factors[1] d)
//
// For Mamba-2's scan (without CORRECTS, see delta_rule.cl) d = u, and skip v is added to out. w is not read.
//
// qkv, w, b, factors  from delta_terms      state  int, see STATE_*; at position 0 the slot counts as 0. S after the tokens
// before a snapshot also goes into the snapshot's slot
// states  float [slots][N_V][D_K][D_V]                out    float [n][N_V][D_V]: u on entry
//
// Index space: groups (D_V / COLUMNS, N_V), local size LOCAL_SIZE, for all tokens in the step. A group has COLUMNS columns of a head's S:
// in local memory for the products with w and q, and in registers for updates. A work-item has 2 columns: TOKENS rows of d and out, ROWS
// rows of S. Rows of w and q pass through local memory SLICE columns at a time, then rows of b, then KEY_TOKENS keys at a time. The next
// data is loaded into registers during each computation.
// Build: CORRECTS, N_K, N_V, D_K, D_V (multiples of 16), HEADS_IN_TURN (see delta_rule.cl), step state constants, and with row groups =
// 2 LOCAL_SIZE / COLUMNS: CHUNK and D_K (multiples of row groups), COLUMNS (divides D_V), SLICE (divides D_K; 4 LOCAL_SIZE divides 2 CHUNK
// SLICE and CHUNK CHUNK), KEY_TOKENS (divides CHUNK; KEY_TOKENS (D_K + 4) and CHUNK (CHUNK + 4) are at most 2 CHUNK (SLICE + 4)).
// Local memory: 4 (D_K COLUMNS + CHUNK COLUMNS + 2 CHUNK (SLICE + 4)) bytes.
#if !defined(N_K) || !defined(N_V) || !defined(D_K) || !defined(D_V) || !defined(CHUNK) || !defined(COLUMNS) || !defined(SLICE) || \
    !defined(KEY_TOKENS) || !defined(LOCAL_SIZE) || !defined(HEADS_IN_TURN) || !defined(STATE_RECURRENT) || !defined(STATE_SNAPSHOT)
#error "delta_chunks.cl needs N_K, N_V, D_K, D_V, CHUNK, COLUMNS, SLICE, KEY_TOKENS, LOCAL_SIZE, HEADS_IN_TURN and slots of the state"
#endif
#include "common/common.cl"
#include "common/delta_row.cl"

#define LANES (COLUMNS / 2)
#define ROW_GROUPS (LOCAL_SIZE / LANES)
#define TOKENS (CHUNK / ROW_GROUPS)
#define ROWS (D_K / ROW_GROUPS)
#define SLICE_PITCH (SLICE + 4)
#define KEY_PITCH (D_K + 4)
#define CHUNK_PITCH (CHUNK + 4)
#define MATRIX_PIECES (CHUNK * SLICE / 4)  // pieces of 4 numbers in w or q
#define MATRICES (CORRECTS ? 2 : 1)        // q, and w before it
#define ALL_PIECES (MATRICES * MATRIX_PIECES)
#define PIECES ((ALL_PIECES + LOCAL_SIZE - 1) / LOCAL_SIZE)
#define B_PIECES (CHUNK * CHUNK / 4 / LOCAL_SIZE)
#define KEY_PIECES ((KEY_TOKENS * D_K / 4 + LOCAL_SIZE - 1) / LOCAL_SIZE)
#define UNROLL _Pragma("unroll")

#define four(p) (*(__global const float4*)(p))
#define four_local(p) (*(__local float4*)(p))
#define two_local(p) (*(__local float2*)(p))

// held: the work-item's pieces of w rows followed by q rows, from column `c` on; of b rows; of keys from token `t0` on.
#define FETCH_SLICE(c)                                                                                                                   \
    UNROLL for (int j = 0; j < PIECES; ++j) {                                                                                            \
        const int i = lid + j * LOCAL_SIZE, t = i % MATRIX_PIECES / (SLICE / 4);                                                         \
        __global const float* matrix = i < ALL_PIECES - MATRIX_PIECES ? w + (row + t * N_V) * D_K                                        \
                                                                      : of_head + FIRST_Q + (size_t)(first + t) * CHANNELS;              \
        held[j] = t < here ? four(matrix + (c) + i % (SLICE / 4) * 4) : (float4)(0.0f);                                                  \
    }
#define FETCH_B                                                                                                                          \
    UNROLL for (int j = 0; j < B_PIECES; ++j) {                                                                                          \
        const int i = lid + j * LOCAL_SIZE, t = i / (CHUNK / 4);                                                                         \
        held_b[j] = t < here ? four(b + (row + t * N_V) * CHUNK + i % (CHUNK / 4) * 4) : (float4)(0.0f);                                 \
    }
#define FETCH_KEYS(t0)                                                                                                                   \
    UNROLL for (int j = 0; j < KEY_PIECES; ++j) {                                                                                        \
        const int i = lid + j * LOCAL_SIZE, t = (t0) + i / (D_K / 4);                                                                    \
        __global const float* key = of_head + FIRST_K + (size_t)(first + t) * CHANNELS + i % (D_K / 4) * 4;                              \
        held_k[j] = t < here && i < KEY_TOKENS * D_K / 4 ? four(key) * factors[(row + t * N_V) * 2 + 1] : (float4)(0.0f);                \
    }

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void delta_chunks(__global const float* qkv, __global const float* w, __global const float* b, __global const float* factors,
                  __global const int* state, __global float* states, __global float* out SCALARS_PARAM) {
    __local float s_of_all[D_K * COLUMNS] __attribute__((aligned(16)));
    __local float d_of_all[CHUNK * COLUMNS] __attribute__((aligned(16)));
    __local float staged[2 * CHUNK * SLICE_PITCH] __attribute__((aligned(16)));
    const int lid = get_local_id(0), lane = lid % LANES, row_group = lid / LANES, v = get_group_id(1);
    const int key_head = HEADS_IN_TURN ? v % N_K : v / (N_V / N_K), column = get_group_id(0) * COLUMNS + 2 * lane;
    const int n = state[STATE_N_TOKENS];
    __global float* slot = states + (((size_t)state[STATE_RECURRENT] * N_V + v) * D_K + row_group * ROWS) * D_V + column;
    __global const float* of_head = qkv + key_head * D_K;
    __local float* own_d = d_of_all + row_group * TOKENS * COLUMNS + 2 * lane;

    float2 s[ROWS];
    UNROLL
    for (int i = 0; i < ROWS; ++i) {
        s[i] = state[STATE_POSITION] > 0 ? (float2)(slot[i * D_V], slot[i * D_V + 1]) : (float2)(0.0f);
        two_local(s_of_all + (row_group * ROWS + i) * COLUMNS + 2 * lane) = s[i];
    }
    const int cut = state[STATE_SNAPSHOT + 1];
    for (int first = 0, next = CHUNK - (CHUNK - cut % CHUNK) % CHUNK; first < n; first = next, next += CHUNK) {
        const int here = min(next, n) - first;
        const size_t row = (size_t)first * N_V + v;  // token t's row: row + t N_V
        float4 held[PIECES], held_b[B_PIECES], held_k[KEY_PIECES];
        float2 p[TOKENS], r[TOKENS];
        UNROLL
        for (int t = 0; t < TOKENS; ++t) p[t] = r[t] = 0.0f;

        FETCH_SLICE(0)
        for (int slice = 0; slice < D_K; slice += SLICE) {
            barrier(CLK_LOCAL_MEM_FENCE);
            UNROLL
            for (int j = 0; j < PIECES; ++j) {
                const int i = lid + j * LOCAL_SIZE;
                if (ALL_PIECES % LOCAL_SIZE == 0 || i < ALL_PIECES)
                    four_local(staged + i / (SLICE / 4) * SLICE_PITCH + i % (SLICE / 4) * 4) = held[j];
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            if (slice + SLICE < D_K) {
                FETCH_SLICE(slice + SLICE)
            } else {
                FETCH_B
            }
            UNROLL
            for (int c = 0; c < SLICE; c += 4) {
                float2 rows[4];
                UNROLL
                for (int j = 0; j < 4; ++j) rows[j] = two_local(s_of_all + (slice + c + j) * COLUMNS + 2 * lane);
                UNROLL
                for (int t = 0; t < TOKENS; ++t) {
                    const float4 of_q = four_local(staged + ((MATRICES - 1) * CHUNK + row_group * TOKENS + t) * SLICE_PITCH + c);
#if CORRECTS
                    const float4 of_w = four_local(staged + (row_group * TOKENS + t) * SLICE_PITCH + c);
                    p[t] += rows[0] * of_w.x;
                    r[t] += rows[0] * of_q.x;
                    p[t] += rows[1] * of_w.y;
                    r[t] += rows[1] * of_q.y;
                    p[t] += rows[2] * of_w.z;
                    r[t] += rows[2] * of_q.z;
                    p[t] += rows[3] * of_w.w;
                    r[t] += rows[3] * of_q.w;
#else
                    r[t] += rows[0] * of_q.x;
                    r[t] += rows[1] * of_q.y;
                    r[t] += rows[2] * of_q.z;
                    r[t] += rows[3] * of_q.w;
#endif
                }
            }
        }
        UNROLL
        for (int t = 0; t < TOKENS; ++t) {
            const int token = row_group * TOKENS + t;
            __global const float* u = out + (row + token * N_V) * D_V + column;
            two_local(own_d + t * COLUMNS) = token < here ? (float2)(u[0], u[1]) - p[t] : (float2)(0.0f);
            if (token < here) r[t] *= factors[(row + token * N_V) * 2];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        UNROLL
        for (int j = 0; j < B_PIECES; ++j) {
            const int i = lid + j * LOCAL_SIZE;
            four_local(staged + i / (CHUNK / 4) * CHUNK_PITCH + i % (CHUNK / 4) * 4) = held_b[j];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        FETCH_KEYS(0)
        UNROLL
        for (int c = 0; c < CHUNK; c += 4) {
            float2 rows[4];
            UNROLL
            for (int j = 0; j < 4; ++j) rows[j] = two_local(d_of_all + (c + j) * COLUMNS + 2 * lane);
            UNROLL
            for (int t = 0; t < TOKENS; ++t) {
                const float4 of_b = four_local(staged + (row_group * TOKENS + t) * CHUNK_PITCH + c);
                r[t] += rows[0] * of_b.x;
                r[t] += rows[1] * of_b.y;
                r[t] += rows[2] * of_b.z;
                r[t] += rows[3] * of_b.w;
            }
        }
        UNROLL
        for (int t = 0; t < TOKENS; ++t) {
            const int token = row_group * TOKENS + t;
            __global float* to = out + (row + token * N_V) * D_V + column;
#if !CORRECTS
            __global const float* value = qkv + (size_t)(first + min(token, here - 1)) * CHANNELS + FIRST_V + v * D_V + column;
            r[t] += (float2)(value[0], value[1]) * SKIP(v);
#endif
            if (token < here) to[0] = r[t].x, to[1] = r[t].y;
        }
        const float kept = factors[(row + (here - 1) * N_V) * 2];
        UNROLL
        for (int i = 0; i < ROWS; ++i) s[i] *= kept;
        for (int token = 0; token < CHUNK; token += KEY_TOKENS) {
            barrier(CLK_LOCAL_MEM_FENCE);
            UNROLL
            for (int j = 0; j < KEY_PIECES; ++j) {
                const int i = lid + j * LOCAL_SIZE;
                if (i < KEY_TOKENS * D_K / 4) four_local(staged + i / (D_K / 4) * KEY_PITCH + i % (D_K / 4) * 4) = held_k[j];
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            if (token + KEY_TOKENS < CHUNK) {
                FETCH_KEYS(token + KEY_TOKENS)
            }
            for (int t = 0; t < KEY_TOKENS; ++t) {
                const float2 d = two_local(d_of_all + (token + t) * COLUMNS + 2 * lane);
                __local const float* k = staged + t * KEY_PITCH + row_group * ROWS;
#if ROWS % 4 == 0
                UNROLL
                for (int i = 0; i < ROWS; i += 4) {
                    const float4 of_k = *(__local const float4*)(k + i);
                    s[i] += d * of_k.x;
                    s[i + 1] += d * of_k.y;
                    s[i + 2] += d * of_k.z;
                    s[i + 3] += d * of_k.w;
                }
#else
                UNROLL
                for (int i = 0; i < ROWS; ++i) s[i] += d * k[i];
#endif
            }
        }
        UNROLL
        for (int i = 0; i < ROWS; ++i) two_local(s_of_all + (row_group * ROWS + i) * COLUMNS + 2 * lane) = s[i];
        if (next != cut) continue;
        __global float* copy = slot + ((long)state[STATE_SNAPSHOT] - state[STATE_RECURRENT]) * (N_V * D_K * D_V);
        UNROLL
        for (int i = 0; i < ROWS; ++i) {
            copy[i * D_V] = s[i].x;
            copy[i * D_V + 1] = s[i].y;
        }
    }
    UNROLL
    for (int i = 0; i < ROWS; ++i) {
        slot[i * D_V] = s[i].x;
        slot[i * D_V + 1] = s[i].y;
    }
}

// A product for one token, W x, by a work-group: shared by nvidia/linear_decode.cl and nvidia/persistent_layers.cl.
//
// A group takes a unit, a 16-row tile or with `gated` two tiles (gate and up), and its warps share the columns in runs of 16. A
// warp reads a run of a tile, 512 consecutive bytes, 16 bytes per lane: 8 rows of a column, as in the portable variant.
//
//     lane:        0        1        2        3      ...      31        tile memory, 16 values a column k:
//     column k:    0        0        1        1               15       [ rows 0-7 | rows 8-15 ] [ rows 0-7 | ...
//     rows:       0-7     8-15      0-7     8-15             8-15
//
// A warp's fragment has as many runs of a unit as registers allow, all in flight at once. As soon as a run is used, the same run of
// the next fragment is requested. A warp receives the columns of its own runs, and no other warp reads them, so there is no barrier
// between x and its use. The norm's scale is applied last, to a row's sum.
//
// A product's first fragment is requested when the first answer for x has come, complete or not: as measured, a compute unit's
// loads are answered in order, and x would only be seen after all weights requested before it.
//
// Sums are bit-identical for the same number of warps per group.
// Build: WEIGHT (f16 or bf16), EPS, WARPS (per group), MAX_COLUMNS (over all products), GATE if a unit is gated.
#include "common/common.cl"
#include "nvidia/ptx.cl"
#include "nvidia/partition.cl"

#define RUN 16    // columns per read of a warp
#define PIECES 8  // 16-byte loads in flight per lane
// Local floats: for a warp's columns; for the sums of two units, the warps' sums of squares and two unit numbers.
#define COLUMN_FLOATS (((MAX_COLUMNS / RUN + WARPS - 1) / WARPS + 7) / 8 * 8 * RUN)
#define SQUARES_AT (WARPS * 64)
#define SUM_FLOATS (SQUARES_AT + WARPS + 2)

typedef struct {
    uint4 words[PIECES];
} weight_fragment;

#define STEPS(m) (((m)->columns / RUN + WARPS - 1) / WARPS)  // runs per warp in a unit
#define FRAGMENTS(m) ((STEPS(m) * TILES(m) + PIECES - 1) / PIECES)
#define FRAGMENT_STEPS(m) ((STEPS(m) + FRAGMENTS(m) - 1) / FRAGMENTS(m))
// Tells whether the run exists: always, in a whole matrix.
#define HAS_RUN(m, step) \
    ((m)->columns / RUN == FRAGMENTS(m) * FRAGMENT_STEPS(m) * WARPS || (step) * WARPS + item / WARP < (m)->columns / RUN)

// Returns the start of a run in a unit's first tile.
inline __global const CAT(WEIGHT, _t)* run_at(const matrix* m, const int unit, const int run) {
    const tile_column at = place_in(m, unit, run * RUN);
    return (__global const CAT(WEIGHT, _t)*)WEIGHT_OF(m, unit) + (at.tile * m->row_columns + at.column) * 16;
}

// A missing run counts 0, but loads the last run instead: the compiler would wait at once for a load that only some steps
// have.
#define LAST_RUN(m) ((m)->columns / RUN - 1)
inline void load_step(weight_fragment* fragment, const matrix* m, const int unit, const int step, const int slot,
                      const int item) {
    const int run = step * WARPS + item / WARP;
    __global const CAT(WEIGHT, _t)* w = run_at(m, unit, HAS_RUN(m, step) ? run : LAST_RUN(m)) + item % WARP * 8;
#pragma unroll
    for (int t = 0; t < TILES(m); ++t) fragment->words[slot * TILES(m) + t] = stream16(w + (size_t)t * m->row_columns * 16);
}

// Requests a warp's first fragment: at the end of the previous product, as in nvidia/product_quantized.cl, or in `receive`.
inline void load_early(weight_fragment* fragment, const matrix* m) {}
inline void load_first(weight_fragment* fragment, const matrix* m) {
    const int item = this_item();
#pragma unroll
    for (int i = 0; i < FRAGMENT_STEPS(m); ++i) load_step(fragment, m, m->first_unit, i, i, item);
}

// Prefetches a warp's first fragment into the L2 cache.
inline void fetch_first(const matrix* m) {
    if (m->first_unit >= m->n_units) return;
    const int item = this_item();
#pragma unroll
    for (int i = 0; i < FRAGMENT_STEPS(m) * TILES(m); ++i) {
        const int run = i / TILES(m) * WARPS + item / WARP;
        if (!HAS_RUN(m, i / TILES(m))) continue;
        fetch_line(run_at(m, m->first_unit, run) + i % TILES(m) * (size_t)m->row_columns * 16 + item % WARP * 8);
    }
}

inline void multiply(float acc[8], const uint4 w, const float x) {
    const uint words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 v = CAT(widen_, WEIGHT)(words[i]);
        acc[2 * i] += v.x * x;
        acc[2 * i + 1] += v.y * x;
    }
}

#define STREAM_FOURS(columns) (((columns) / RUN + 8 * WARPS - 1) / (8 * WARPS))  // float4 values of x received per work-item

// The columns received by a work-item: a warp takes 8 runs at once, 4 lanes per run.
inline places places_of(const int columns) {
    const int item = this_item(), lane = item % WARP, step = 8 * WARPS * RUN;
    const int first = (lane / 4 * WARPS + item / WARP) * RUN + lane % 4 * 4;
    const places p = {first, 2 * step, step, first < columns ? (columns - first + step - 1) / step : 0, STREAM_FOURS(columns), item};
    return p;
}

// Stores the warp's columns of x, times the norm's weights, in `columns` (local, the warp's own), and its sum of squares in `sums`.
// fragment: gets the first fragment. stream: the stream to add x to first; 0 for none.
inline void receive(weight_fragment* fragment, const matrix* m, __global const float* x, const uint flag, const bool wait,
                    __global const float* norm, const bool normed, const residual_stream* stream, __local float* columns,
                    __local float* sums) {
    const places p = places_of(m->columns);
    const int lane = p.item % WARP, most = p.most, step = p.step;
    uint4 words[SPLIT_K * (COLUMN_FLOATS / 128)];
    float4 factors[COLUMN_FLOATS / 128];
    float square = 0.0f;
    poll_first(words, x + p.first, p.stride, step, p.count, most, flag);
    if (stream) poll_parts(words, x + p.first, &p, stream, flag);
#pragma unroll
    for (int i = 0; i < (normed ? most : 0); ++i) factors[i] = vload4(0, norm + min(p.first + i * step, m->columns - 4));
    const bool waiting = wait && poll_again(words, x + p.first, p.stride, step, p.count, most, flag);
    if (m->first_unit < m->n_units) load_first(fragment, m);
#pragma unroll
    for (int i = 0; i < (normed ? most : 0); ++i) vstore4(factors[i], lane + i * WARP, columns);  // keeps them out of registers meanwhile
    while (waiting && poll_again(words, x + p.first, p.stride, step, p.count, most, flag)) {
    }
    if (stream) add_to_stream(stream, words, x + p.first, &p, flag);
#pragma unroll
    for (int i = 0; i < most; ++i) {
        if (i >= p.count) continue;
        float4 v = values_of(words[i]);
        if (normed) {
            square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            v *= vload4(lane + i * WARP, columns);
        }
        if (m->shares) v *= m->shares[SLOT_OF(m, 0, p.first + i * step)];
        vstore4(v, lane + i * WARP, columns);
    }
    warp_sync();
    if (normed) {
        square = warp_sum(square);
        if (lane == 0) sums[SQUARES_AT + p.item / WARP] = square;
    }
}

// Computes partition m of epilogue(W rms_norm(x)). columns: from receive. rows: of the output. fragment: holds the first fragment.
// next: for nvidia/product_quantized.cl. sums: SUM_FLOATS; `parity` selects the free half.
inline void product(const matrix* m, const matrix* next, const target* to, const int rows, const bool normed,
                    __local const float* columns, __local float* sums, int* parity, weight_fragment* fragment) {
    const int item = this_item(), lane = item % WARP, warp = item / WARP;
    __local int* taken = (__local int*)(sums + SQUARES_AT + WARPS);  // a unit per parity
    int next_unit = m->first_unit + m->unit_stride, after_next, own = 0;
    for (int unit = m->first_unit; unit < m->n_units; unit = next_unit, next_unit = after_next, *parity ^= 1, ++own) {
        const bool claims = m->claims && next_unit < m->n_units;
        uint claim = 0;
        if (claims && item == 0) claim = atomic_inc(m->claims) - m->claimed;
        float bias = 0.0f;
        if (to->bias && warp == own % WARPS) {
            bias = bias_of(to, m, rows, min(unit * 16 + lane % 16, rows - 1), lane / 16);
        }
        float acc[2][8];
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int i = 0; i < 8; ++i) acc[t][i] = 0.0f;
#pragma unroll 1
        for (int part = 0; part < FRAGMENTS(m); ++part) {
            const bool last = part == FRAGMENTS(m) - 1;
            const int unit_then = last ? next_unit : unit, next_part = last ? 0 : part + 1;
            const bool more = unit_then < m->n_units;
#pragma unroll
            for (int i = 0; i < FRAGMENT_STEPS(m); ++i) {
                const int step = part * FRAGMENT_STEPS(m) + i;
                const float v = HAS_RUN(m, step) ? columns[step * RUN + lane / 2] : 0.0f;
#pragma unroll
                for (int t = 0; t < TILES(m); ++t) multiply(acc[t], fragment->words[i * TILES(m) + t], v);
                if (more) load_step(fragment, m, unit_then, next_part * FRAGMENT_STEPS(m) + i, i, item);
            }
        }
        __local float* here = sums + *parity * WARPS * 32;  // [WARPS][2][16]
#pragma unroll
        for (int t = 0; t < TILES(m); ++t) {
            const float sum = sum8(acc[t], lane);
            if (!(lane & 2)) here[(warp * 2 + t) * 16 + (lane & 1) * 8 + sum8_index(lane)] = sum;
        }
        if (claims && item == 0) taken[*parity] = 2 * m->unit_stride + claim;
        barrier(CLK_LOCAL_MEM_FENCE);
        after_next = claims ? taken[*parity] : next_unit + m->unit_stride;
        if (warp == own % WARPS) {
            // Half the warp sums the gate's rows and half up's rows, or each half sums every second warp's values.
            const int half_warp = lane / 16, row = unit * 16 + lane % 16;
            float y = 0.0f, scale = 1.0f;
#pragma unroll
            for (int i = 0; i < WARPS; i += m->gated ? 1 : 2) {
                const int from = m->gated ? i : i + half_warp;
                if (from < WARPS) y += here[(from * 2 + (m->gated ? half_warp : 0)) * 16 + lane % 16];
            }
            const float other = shuffle_xor(y, 16);
            if (normed) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < WARPS; ++i) sum += sums[SQUARES_AT + i];
                scale = rsqrt(NO_OVERFLOW(sum) / m->columns + EPS);
            }
            float value = (m->gated ? y : y + other) * scale;
#ifdef GATE
            if (m->gated) {
                float up = other * scale;
                if (to->bias) {
                    value = add_rounded(value, bias);
                    up = add_rounded(up, shuffle_xor(bias, 16));
                }
                value = APPLY_GATE(value, up, exp, float);
            }
#endif
            if (lane < 16 && row < rows) deliver(to, row, own * 16 + lane, value, to->bias && !m->gated, bias);
            warp_sync();  // no lane waits for values that its own warp has yet to send
        }
    }
}

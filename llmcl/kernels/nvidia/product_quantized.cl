// A product of a quantised weight with one token, W x, by a work-group: shared by nvidia/linear_decode_quantized.cl and
// nvidia/persistent_layers.cl. Replaces nvidia/product.cl, with the same functions.
//
// A quarter of a warp reads a group of a tile (tiles.cl), a lane reads a piece: columns 8h .. 8h+7 and 8h+16 .. 8h+23 in four rows,
// 32 bytes of nibbles.
//
//     lane % 8:     0        1        2        3        4       ...     7        vectors 2h and 2h+1, h = lane % 8 / 4
//     rows:        0-3      4-7      8-11    12-15     0-3     ...    12-15
//     columns:    h = 0                               h = 1
//
// A step of a tile is 4 groups per warp. The pieces of a fragment are in flight at once: pieces of several tiles, of one tile, or
// of a part of a tile (`walk`). As soon as a piece is used, the same piece of the next fragment is requested; after the last
// fragment, the next product's first fragment. A lane's sums are added over lanes with the same rows at the end of a tile, and over
// the warps at the end of many tiles. A warp receives the columns of its own groups.
//
// DOT 1: activations are rounded to 8 bits per group, as in cpu/quant_tile.cl, s = max |x| / 127, x ~ s xq, and dp4a multiplies
// four columns. An exact integer for 16 columns times d s is added in float32. DOT 0: float32 throughout.
//
// Sums are bit-identical for the same number of warps per group.
// Build: WEIGHT (quantised), DOT, EPS, WARPS (per group), MAX_COLUMNS (over all products), GATE if a unit is gated.
#include "common/tiles.cl"
#include "nvidia/ptx.cl"
#include "nvidia/partition.cl"

#define SLOTS 16  // tiles whose sums wait for the remaining warps
#define TILE_BYTES(columns) ((columns) / (IS_SUPER ? 256 : 32) * (size_t)(IS_SUPER ? SUPER_BYTES : GROUP_BYTES))
// Local floats: for a warp's columns; for the sums of waiting tiles, twice, and for the warps' sums of squares.
#define STEPS_OF(columns) (((columns) / 32 + 4 * WARPS - 1) / (4 * WARPS))
#define PARTS_OF(columns) ((STEPS_OF(columns) + PIECES - 1) / PIECES)
// A tile of x has three steps: a fragment with two or four pieces would leave a fourth step empty.
#ifdef HIDDEN
#define THREE_STEPS (STEPS_OF(HIDDEN) == 3)
#else
#define THREE_STEPS (STEPS_OF(MAX_COLUMNS) == 3)
#endif
#define HAS_HIGH_BITS (WEIGHT_IS(q8_0) || WEIGHT_IS(q6_k) || HAS_FIFTH_BIT)
#ifdef OTHER_WEIGHT
#include "nvidia/pieces_of_two_types.cl"
#else
// Maximum pieces per fragment, limited by registers. With four pieces of q4_k the compiler moves fragments to memory if MAX_COLUMNS
// is large, and a 70B step takes twice the time (notes/h200.md).
#define WIDE_PIECE (WEIGHT_IS(q8_0) || WEIGHT_IS(q6_k) || WEIGHT_IS(q5_k) || WEIGHT_IS(q5_1))
#define PIECES (DOT && WEIGHT_IS(q4_k) ? 2 + THREE_STEPS : (WIDE_PIECE ? 1 : 2) * (DOT ? 2 : 1))
#define GROUPS_OF(columns) (4 * (((STEPS_OF(columns) + PARTS_OF(columns) - 1) / PARTS_OF(columns) * PARTS_OF(columns) + 1) / 2 * 2))
#endif
#define MAX_GROUPS GROUPS_OF(MAX_COLUMNS)
#define STREAM_FOURS(columns) (GROUPS_OF(columns) / 4)  // float4 values of x received per work-item
#define GROUP_FLOATS (DOT ? 9 : 32)
#define COLUMN_FLOATS (MAX_GROUPS * GROUP_FLOATS)
#define SQUARES_AT (2 * WARPS * SLOTS * 16)
#define SUM_FLOATS (SQUARES_AT + WARPS)

// A lane's part of a group: the numbers and the scales of its four rows. LAST, HIGH: the same for a piece p.
#ifndef OTHER_WEIGHT
typedef struct {
    uint4 quants[2];
#if WEIGHT_IS(q8_0)
    uint4 last[2];  // for columns from 16 on
#elif HAS_FIFTH_BIT || WEIGHT_IS(q6_k)
    uint4 high[WEIGHT_IS(q6_k) ? 2 : 1];  // fifth bits; bit pairs for the first and the last 16 columns
#endif
    uint2 d;
#if HAS_MIN
    uint2 m;
#endif
#if IS_SUPER
    uint2 factors;  // sc and mn in q4_k and q5_k, both sc in q6_k
#endif
} piece;

typedef struct {
    piece pieces[PIECES];
} weight_fragment;
#define LAST p->last
#define HIGH p->high
#define PIECE_AT(i) i
#define load_next load_early
#endif

// A group's order of work through its tiles. All but the number of tiles is fixed at compile time.
typedef struct {
    int steps, parts, part_steps, fragment_tiles;  // steps per tile; fragments per tile, steps per fragment, or tiles per fragment
    int item, first_group, tiles, fragments;  // item: the work-item
} walk;
#define STEP_GROUPS (4 * WARPS)

ALWAYS_INLINE walk walk_of(const matrix* m) {
    walk w;
    w.steps = (m->columns / 32 + STEP_GROUPS - 1) / STEP_GROUPS;
    w.parts = (w.steps + PIECES - 1) / PIECES;
    w.part_steps = (w.steps + w.parts - 1) / w.parts;
    w.fragment_tiles = w.parts == 1 ? PIECES / w.steps : 1;
    w.item = this_item();
    w.first_group = 4 * (w.item / WARP) + w.item % WARP / 8;
    const int units = m->first_unit < m->n_units ? (m->n_units - m->first_unit + m->unit_stride - 1) / m->unit_stride : 0;
    w.tiles = TILES(m) * units;
    w.fragments = (w.tiles + w.fragment_tiles - 1) / w.fragment_tiles * w.parts;
    return w;
}

// Tells whether a tile has a group in every step of every fragment; otherwise a piece past the end has scales of 0.
#define IS_WHOLE(m, w) ((m)->columns / 32 == (w)->parts * (w)->part_steps * STEP_GROUPS)

// A tile, and the group in the tile for column group g.
typedef struct {
    __global const uchar* tile;
    int group;
} tile_group;

// In a work-group's i-th tile.
ALWAYS_INLINE tile_group group_at(const matrix* m, const int i, const int g) {
    const int unit = m->first_unit + (m->gated ? i / 2 : i) * m->unit_stride;
    const tile_column there = place_in(m, unit, 32 * g);
    const size_t tile = there.tile + (m->gated ? i % 2 : 0);
    const tile_group at = {(__global const uchar*)WEIGHT_OF(m, unit) + TILE_BYTES(m->row_columns) * tile, there.column / 32};
    return at;
}

// Loads a piece of the i-th tile.
ALWAYS_INLINE void load_piece(piece* p, const matrix* m, const int i, const walk* w, const int step) {
    const int lane = w->item % WARP, quad = lane % 4, g_all = w->first_group + step * STEP_GROUPS;
    if (!IS_WHOLE(m, w) && g_all >= m->columns / 32) {
        p->d = 0;
#if HAS_MIN
        p->m = 0;
#endif
        return;
    }
    const tile_group at = group_at(m, i, g_all);
    __global const uchar* tile = at.tile;
    const int g = at.group;
    __global const uchar* group = tile + GROUP_AT(g);
    __global const uchar* quants = group + SCALE_BYTES + lane % 8 / 4 * 128 + quad * 16;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
        p->quants[v] = stream16(quants + 64 * v);
#if WEIGHT_IS(q8_0)
        LAST[v] = stream16(quants + 256 + 64 * v);
#elif WEIGHT_IS(q6_k)
        HIGH[v] = stream16(group + SCALE_BYTES + 256 + 64 * v + quad * 16);
#endif
    }
#if HAS_FIFTH_BIT
    HIGH[0] = stream16(group + SCALE_BYTES + 256 + quad * 16);
#endif
#if IS_SUPER
    __global const uchar* head = tile + g / 8 * SUPER_BYTES;
    p->factors = (uint2)(load4_words(group + quad * 4), load4_words(group + 16 + quad * 4));
#else
    __global const uchar* head = group;
#endif
#if WEIGHT_IS(mxfp4)
    p->d = (uint2)(load4_words(head + quad * 4), 0);
#else
    p->d = load8_words(head + quad * 8);
#endif
#if HAS_MIN
    p->m = load8_words(head + 32 + quad * 8);
#endif
}

// Loads the pieces for tile i of a fragment; `part` of the tile.
ALWAYS_INLINE void load_pieces(weight_fragment* fragment, const matrix* m, const walk* w, const int first_tile, const int part,
                               const int i) {
    if (first_tile + i >= w->tiles) return;
#pragma unroll
    for (int s = 0; s < w->part_steps; ++s)
        load_piece(fragment->pieces + PIECE_AT(i * w->part_steps + s), m, first_tile + i, w, part * w->part_steps + s);
}

// Requests a warp's first fragment, which does not depend on x.
ALWAYS_INLINE void load_early(weight_fragment* fragment, const matrix* m) {
    const walk w = walk_of(m);
#pragma unroll
    for (int i = 0; i < w.fragment_tiles; ++i) load_pieces(fragment, m, &w, 0, 0, i);
}

// Prefetches the first fragment's numbers into the L2 cache only.
ALWAYS_INLINE void fetch_first(const matrix* m) {
    const walk w = walk_of(m);
#pragma unroll
    for (int i = 0; i < w.fragment_tiles; ++i)
        for (int s = 0; s < w.part_steps; ++s)
            if (i < w.tiles && w.first_group + s * STEP_GROUPS < m->columns / 32) {
                const tile_group at = group_at(m, i, w.first_group + s * STEP_GROUPS);
                fetch_line(at.tile + GROUP_AT(at.group) + w.item % 8 * 32);
            }
}

// ---- a piece's product ----------------------------------------------------------------------------------

#if WEIGHT_IS(mxfp4)
// mxfp4_numbers for the lower and the upper half of each byte: `permute` looks up twice the magnitude for four codes at once.
ALWAYS_INLINE void mxfp4_numbers8(const uint codes, uint* lower, uint* upper) {
    const uint sizes = codes & 0x77777777u;
    const uint a = permute(0x03020100u, 0x0c080604u, sizes), b = permute(0x03020100u, 0x0c080604u, sizes >> 16);
    const uint low = permute(a, b, 0x6420), high = permute(a, b, 0x7531);
    // A digit from 8 to b gives a byte's sign, eight times.
    *lower = 0x0c0c0c0cu + low - ((low & permute(codes << 4, 0, 0xba98)) << 1);
    *upper = 0x0c0c0c0cu + high - ((high & permute(codes, 0, 0xba98)) << 1);
}
#endif

// Row i's bytes for the 16 columns of half h, in the order of the activations: two words for the first 16 columns, two for the last.
ALWAYS_INLINE void unpack(const piece* p, const int i, const int h, uint q[4]) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
        const uint u = word_of(p->quants[v], i);
#if WEIGHT_IS(q8_0)
        q[v] = u;
        q[2 + v] = word_of(LAST[v], i);
#else
        q[v] = u & 0x0f0f0f0fu;
        q[2 + v] = u >> 4 & 0x0f0f0f0fu;
#endif
#if WEIGHT_IS(mxfp4)
        mxfp4_numbers8(u, q + v, q + 2 + v);
#endif
#if HAS_FIFTH_BIT
        const uint high = word_of(HIGH[0], i) >> (2 * h);
        q[v] |= (high >> v & 0x01010101u) << 4;
        q[2 + v] |= high >> v & 0x10101010u;
#elif WEIGHT_IS(q6_k)
        q[v] |= word_of(HIGH[0], i) >> (4 * h) << (4 - 2 * v) & 0x30303030u;
        q[2 + v] |= word_of(HIGH[1], i) >> (4 * h) << (4 - 2 * v) & 0x30303030u;
#endif
    }
}

ALWAYS_INLINE void widen4(const uint2 u, float v[4]) {
    const float2 a = widen_f16(u.x), b = widen_f16(u.y);
    v[0] = a.x;
    v[1] = a.y;
    v[2] = b.x;
    v[3] = b.y;
}

typedef struct {
    float d[4], d_last[4], m[4];  // d_last: for the last 16 columns, with q6_k
} scales4;

ALWAYS_INLINE scales4 scales_of(const piece* p) {
    scales4 s;
#if WEIGHT_IS(mxfp4)
#pragma unroll
    for (int i = 0; i < 4; ++i) s.d[i] = mxfp4_scale((uchar)(p->d.x >> (8 * i)));
#else
    widen4(p->d, s.d);
#endif
#if HAS_MIN
    widen4(p->m, s.m);
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if WEIGHT_IS(q6_k)
        const float d = s.d[i];
        s.d[i] = d * (float)(char)(p->factors.x >> (8 * i));
        s.d_last[i] = d * (float)(char)(p->factors.y >> (8 * i));
#elif IS_SUPER
        s.d[i] *= (float)(uchar)(p->factors.x >> (8 * i));
        s.m[i] *= -(float)(uchar)(p->factors.y >> (8 * i));
#endif
#if !WEIGHT_IS(q6_k)
        s.d_last[i] = s.d[i];
#endif
#if !HAS_MIN
        s.m[i] = 0.0f;
#endif
    }
    return s;
}

#if DOT
// An integer below 2^22 in magnitude, added to the bits of this float, becomes the float's value.
#define INTEGER_BITS 0x4b400000
ALWAYS_INLINE float integer_of(const int sum) { return as_float(sum) - 0x1.8p23f; }
#define MINUS_OFFSET ((256 - OFFSET) * 0x01010101u)  // as four signed bytes
ALWAYS_INLINE int start_of(const int x, const int sum) { return OFFSET ? dot4_signed(MINUS_OFFSET, x, sum) : sum; }

// x: four words of rounded activations
ALWAYS_INLINE void multiply_piece(const piece* p, const int4 x, const float scale, const int h, float acc[4]) {
    const scales4 s = scales_of(p);
    const int start = start_of(x.y, start_of(x.x, INTEGER_BITS));
    const int start_last = start_of(x.w, start_of(x.z, WEIGHT_IS(q6_k) ? INTEGER_BITS : start));
#if HAS_MIN
    int total = dot4_signed(0x01010101, x.y, dot4_signed(0x01010101, x.x, INTEGER_BITS));
    total = dot4_signed(0x01010101, x.w, dot4_signed(0x01010101, x.z, total));
    const float sum = scale * integer_of(total);
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint q[4];
        unpack(p, i, h, q);
        const int last = dot4(q[3], x.w, dot4(q[2], x.z, start_last));
#if WEIGHT_IS(q6_k)
        const int first = dot4(q[1], x.y, dot4(q[0], x.x, start));
        acc[i] += (integer_of(first) * s.d[i] + integer_of(last) * s.d_last[i]) * scale;
#else
        acc[i] += integer_of(dot4(q[1], x.y, dot4(q[0], x.x, last))) * (s.d[i] * scale);
#endif
#if HAS_MIN
        acc[i] += s.m[i] * sum;
#endif
    }
}
#else
// Byte b without the offset: added to the bits of 2^23, a byte becomes a part of the float's value.
#define BYTE_OF(u, b) (as_float(permute(u, 0x4b000000, 0x7440 + (b))) - (0x1p23f + OFFSET))

ALWAYS_INLINE void multiply_piece(const piece* p, const float x[16], const int h, float acc[4]) {
    const scales4 s = scales_of(p);
    float sum = 0.0f;
#pragma unroll
    for (int b = 0; b < 16; ++b) sum += x[b];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint q[4];
        float y[2] = {0.0f, 0.0f};
        unpack(p, i, h, q);
#pragma unroll
        for (int b = 0; b < 16; ++b) y[b / 8] += BYTE_OF(q[b / 4], b % 4) * x[b];
        acc[i] += WEIGHT_IS(q6_k) ? y[0] * s.d[i] + y[1] * s.d_last[i] : (y[0] + y[1]) * s.d[i];
        if (HAS_MIN) acc[i] += s.m[i] * sum;
    }
}
#endif

#include "nvidia/quantized_columns.cl"

// Computes partition m of epilogue(W rms_norm(x)). columns: from receive. rows: of the output. fragment: holds the first fragment,
// and gets the first fragment of `next`. sums: SUM_FLOATS; `parity` selects the free half.
ALWAYS_INLINE void product(const matrix* m, const matrix* next, const target* to, const int rows, const bool normed,
                           __local const float* columns, __local float* sums, int* parity, weight_fragment* fragment) {
    const walk w = walk_of(m);
    const int lane = w.item % WARP, h = lane % 8 / 4, warp = w.item / WARP;
    if (w.fragments == 0) load_next(fragment, next);
    int part = 0, first_tile = 0, finished = 0;
    float acc[PIECES][4];
    for (int t = 0; t < w.fragments; ++t) {
        const int next_part = part + 1 == w.parts ? 0 : part + 1;
        const int next_tile = next_part == 0 ? first_tile + w.fragment_tiles : first_tile;
#pragma unroll
        for (int i = 0; i < w.fragment_tiles; ++i) {
            if (part == 0) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f;
#pragma unroll
            for (int s = 0; s < w.part_steps; ++s) {
                const int g = (part * w.part_steps + s) * 4 + lane / 8;  // among the warp's groups
                const piece* p = fragment->pieces + PIECE_AT(i * w.part_steps + s);
#if DOT
                multiply_piece(p, *(__local const int4*)(columns + 8 * g + 4 * h), columns[8 * MAX_GROUPS + g], h, acc[i]);
#else
                float v[16];
#pragma unroll
                for (int b = 0; b < 4; ++b)
                    vstore4(vload4(0, columns + 32 * g + 8 * h + b / 2 * 16 + b % 2 * 4), b, v);
                multiply_piece(p, v, h, acc[i]);
#endif
            }
            load_pieces(fragment, m, &w, next_tile, next_part, i);
        }
        __local float* here = sums + *parity * WARPS * SLOTS * 16;  // [WARPS][SLOTS][16]
        if (t == w.fragments - 1) load_next(fragment, next);
        if (next_part == 0) {
#pragma unroll
            for (int i = 0; i < w.fragment_tiles; ++i) {
                const float sum = sum4((float4)(acc[i][0], acc[i][1], acc[i][2], acc[i][3]), lane);
                const int slot = first_tile + i - finished;
                if (!(lane & 4) && first_tile + i < w.tiles) here[(warp * SLOTS + slot) * 16 + sum4_index(lane)] = sum;
            }
        }
        part = next_part;
        first_tile = next_tile;
        // Whole units; two more fragments fit beside the waiting tiles.
        const int count = min(first_tile, w.tiles) - finished;
        if (t < w.fragments - 1 && (count <= SLOTS - 2 * PIECES || count % TILES(m))) continue;
        barrier(CLK_LOCAL_MEM_FENCE);
        float scale = 1.0f;
        if (normed) {
            float sum = 0.0f;
            for (int i = 0; i < WARPS; ++i) sum += sums[SQUARES_AT + i];
            scale = rsqrt(NO_OVERFLOW(sum) / m->columns + EPS);
        }
        finish(m, to, here, scale, rows, finished, count);
        finished += count;
        *parity ^= 1;
        warp_sync();  // no lane waits for values that its own warp has yet to send
    }
}

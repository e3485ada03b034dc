// A product of a quantised weight with one token, W x, by teams of warps: what nvidia/linear_decode_quantized.cl and
// nvidia/decode_layers.cl have in common. It takes the place of nvidia/product.cl, with the same functions.
//
// A team takes a unit, one 16-row tile or with `gated` two (gate and up). A quarter of a warp reads a group of a tile (tiles.cl),
// a lane a piece of it: columns 8h .. 8h+7 and 8h+16 .. 8h+23 of four rows, 32 bytes of nibbles.
//
//     lane % 8:     0        1        2        3        4       ...     7        vectors 2h and 2h+1, h = lane % 8 / 4
//     rows:        0-3      4-7      8-11    12-15     0-3     ...    12-15
//     columns:    h = 0                               h = 1
//
// A step of a team is 4 groups for each of its warps. The pieces of a turn are on their way at once: those of several tiles, of
// one, or of a part of one (`walk`). As soon as a piece is used the same piece of the next turn is asked for. A lane's sums are
// added over the lanes that have the same rows at the end of a tile, and over the team's warps at the end of many tiles.
//
// DOT 1: activations are rounded to 8 bits for each group, as in cpu/quant_tile.cl, s = max |x| / 127, x ~ s xq, and four columns
// are multiplied by dp4a. An exact integer of 16 columns times d s is added in float32. DOT 0: float32 throughout.
//
// Sums are the same to the bit for the same number of warps in a team.
// Build: WEIGHT (quantised), DOT, EPS, WARPS (16, of a work-group), GATE where a unit is gated.
#include "tiles.cl"
#include "nvidia/ptx.cl"

#define SLOTS 16  // tiles whose sums wait for the rest of the team
// At most in a turn: as many as registers allow.
#define PIECES ((WEIGHT_IS(q8_0) || WEIGHT_IS(q6_k) || WEIGHT_IS(q5_k) || WEIGHT_IS(q5_1) ? 1 : 2) * (DOT ? 2 : 1))
#define TILE_BYTES(columns) ((columns) / (IS_SUPER ? 256 : 32) * (size_t)(IS_SUPER ? SUPER_BYTES : GROUP_BYTES))
#define ACTIVATION_FLOATS(columns) (DOT ? (columns) / 4 + (columns) / 32 : 0)
// Local floats for the teams of a work-group.
#define PRODUCT_FLOATS(columns) (WARPS + SLOTS * 16 * WARPS + ACTIVATION_FLOATS(columns))

// What a lane reads of a group: its numbers and the scales of its four rows.
typedef struct {
    uint4 quants[2];
#if WEIGHT_IS(q8_0)
    uint4 last[2];  // of columns from 16 on
#elif HAS_FIFTH_BIT || WEIGHT_IS(q6_k)
    uint4 high[WEIGHT_IS(q6_k) ? 2 : 1];  // fifth bits; bit pairs of the first and of the last 16 columns
#endif
    uint2 d;
#if HAS_MIN
    uint2 m;
#endif
#if IS_SUPER
    uint2 factors;  // sc and mn of q4_k and q5_k, the two sc of q6_k
#endif
} piece;

typedef struct {
    piece pieces[PIECES];
} weight_turn;

// How a team goes through its tiles. All but the numbers of units is fixed when a kernel is compiled.
typedef struct {
    int columns, warps, step_groups, steps;  // steps: of a tile
    int parts, part_steps, turn_tiles;       // turns of a tile, their steps, or tiles of a turn
    int first_group, first_unit, unit_stride, tiles, turns;
    bool gated;
} walk;

inline walk walk_of(const int columns, const bool gated, const int n_units, const int first_unit, const int unit_stride,
                    const int warps, const int member) {
    walk w;
    w.columns = columns;
    w.warps = warps;
    w.step_groups = 4 * warps;
    w.steps = (columns / 32 + w.step_groups - 1) / w.step_groups;
    w.parts = (w.steps + PIECES - 1) / PIECES;
    w.part_steps = (w.steps + w.parts - 1) / w.parts;
    w.turn_tiles = w.parts == 1 ? PIECES / w.steps : 1;
    w.first_group = 4 * member + get_local_id(0) % WARP / 8;
    w.first_unit = first_unit;
    w.unit_stride = unit_stride;
    const int units = first_unit < n_units ? (n_units - first_unit + unit_stride - 1) / unit_stride : 0;
    w.tiles = gated ? 2 * units : units;
    w.turns = (w.tiles + w.turn_tiles - 1) / w.turn_tiles * w.parts;
    w.gated = gated;
    return w;
}

// Whether a tile has a group in every step of every turn; where not, a piece past its end has scales of 0.
#define IS_WHOLE(w) ((w)->columns / 32 == (w)->parts * (w)->part_steps * (w)->step_groups)

// Where the i-th tile of a team begins.
inline __global const uchar* tile_at(__global const uchar* weight, const walk* w, const int i) {
    const int unit = w->first_unit + (w->gated ? i / 2 : i) * w->unit_stride;
    return weight + TILE_BYTES(w->columns) * (w->gated ? 2 * unit + i % 2 : unit);
}

inline void load_piece(piece* p, __global const uchar* tile, const walk* w, const int step) {
    const int lane = get_local_id(0) % WARP, quad = lane % 4, g = w->first_group + step * w->step_groups;
    if (!IS_WHOLE(w) && g >= w->columns / 32) {
        p->d = 0;
#if HAS_MIN
        p->m = 0;
#endif
        return;
    }
    __global const uchar* group = tile + GROUP_AT(g);
    __global const uchar* quants = group + SCALE_BYTES + lane % 8 / 4 * 128 + quad * 16;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
        p->quants[v] = stream16(quants + 64 * v);
#if WEIGHT_IS(q8_0)
        p->last[v] = stream16(quants + 256 + 64 * v);
#elif WEIGHT_IS(q6_k)
        p->high[v] = stream16(group + SCALE_BYTES + 256 + 64 * v + quad * 16);
#endif
    }
#if HAS_FIFTH_BIT
    p->high[0] = stream16(group + SCALE_BYTES + 256 + quad * 16);
#endif
#if IS_SUPER
    __global const uchar* head = tile + g / 8 * SUPER_BYTES;
    p->factors = (uint2)(load4_words(group + quad * 4), load4_words(group + 16 + quad * 4));
#else
    __global const uchar* head = group;
#endif
    p->d = load8_words(head + quad * 8);
#if HAS_MIN
    p->m = load8_words(head + 32 + quad * 8);
#endif
}

// The pieces of tile i of a turn; `part` of the tile.
inline void load_pieces(weight_turn* turn, __global const uchar* weight, const walk* w, const int first_tile, const int part,
                        const int i) {
    if (first_tile + i >= w->tiles) return;
    __global const uchar* tile = tile_at(weight, w, first_tile + i);
#pragma unroll
    for (int s = 0; s < w->part_steps; ++s)
        load_piece(turn->pieces + i * w->part_steps + s, tile, w, part * w->part_steps + s);
}

// Asks for a warp's first turn, which does not depend on x.
inline void load_turn(weight_turn* turn, __global const uchar* weight, const int columns, const bool gated, const int n_units,
                      const int first_unit, const int unit_stride, const int warps, const int member) {
    const walk w = walk_of(columns, gated, n_units, first_unit, unit_stride, warps, member);
#pragma unroll
    for (int i = 0; i < w.turn_tiles; ++i) load_pieces(turn, weight, &w, 0, 0, i);
}

// ---- a piece's product ----------------------------------------------------------------------------------

inline uint word_of(const uint4 v, const int i) { return i < 2 ? (i == 0 ? v.x : v.y) : (i == 2 ? v.z : v.w); }

// Row i's bytes of the 16 columns, in the order of the activations: two words of the first 16 columns, two of the last.
inline void unpack(const piece* p, const int i, uint q[4]) {
    const int h = get_local_id(0) % 8 / 4;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
        const uint u = word_of(p->quants[v], i);
#if WEIGHT_IS(q8_0)
        q[v] = u;
        q[2 + v] = word_of(p->last[v], i);
#else
        q[v] = u & 0x0f0f0f0fu;
        q[2 + v] = u >> 4 & 0x0f0f0f0fu;
#endif
#if HAS_FIFTH_BIT
        const uint high = word_of(p->high[0], i) >> (2 * h);
        q[v] |= (high >> v & 0x01010101u) << 4;
        q[2 + v] |= high >> v & 0x10101010u;
#elif WEIGHT_IS(q6_k)
        q[v] |= word_of(p->high[0], i) >> (4 * h) << (4 - 2 * v) & 0x30303030u;
        q[2 + v] |= word_of(p->high[1], i) >> (4 * h) << (4 - 2 * v) & 0x30303030u;
#endif
    }
}

inline void widen4(const uint2 u, float v[4]) {
    const float2 a = widen_f16(u.x), b = widen_f16(u.y);
    v[0] = a.x;
    v[1] = a.y;
    v[2] = b.x;
    v[3] = b.y;
}

typedef struct {
    float d[4], d_last[4], m[4];  // d_last: of the last 16 columns, with q6_k
} scales4;

inline scales4 scales_of(const piece* p) {
    scales4 s;
    widen4(p->d, s.d);
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
// An integer below 2^22 in size, added to the bits of this float, is its value.
#define INTEGER_BITS 0x4b400000
inline float integer_of(const int sum) { return as_float(sum) - 0x1.8p23f; }
#define MINUS_OFFSET ((256 - OFFSET) * 0x01010101u)  // as four signed bytes
inline int start_of(const int x, const int sum) { return OFFSET ? dot4_signed(MINUS_OFFSET, x, sum) : sum; }

// x: four words of rounded activations
inline void multiply_piece(const piece* p, const int4 x, const float scale, float acc[4]) {
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
        unpack(p, i, q);
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
// Byte b without the offset: added to the bits of 2^23, a byte is a part of that float's value.
#define BYTE_OF(u, b) (as_float(permute(u, 0x4b000000, 0x7440 + (b))) - (0x1p23f + OFFSET))

inline void multiply_piece(const piece* p, const float x[16], float acc[4]) {
    const scales4 s = scales_of(p);
    float sum = 0.0f;
#pragma unroll
    for (int b = 0; b < 16; ++b) sum += x[b];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint q[4];
        float y[2] = {0.0f, 0.0f};
        unpack(p, i, q);
#pragma unroll
        for (int b = 0; b < 16; ++b) y[b / 8] += BYTE_OF(q[b / 4], b % 4) * x[b];
        acc[i] += WEIGHT_IS(q6_k) ? y[0] * s.d[i] + y[1] * s.d_last[i] : (y[0] + y[1]) * s.d[i];
        if (HAS_MIN) acc[i] += s.m[i] * sum;
    }
}
#endif

// ---- the token ------------------------------------------------------------------------------------------

// Four columns of x, or of norm * x. Adds the squares of x.
inline float4 load_columns(__global const float* x, __global const float* norm, const int column, const bool normed,
                           float* square) {
    const float4 v = vload4(0, x + column);
    *square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    return normed ? v * vload4(0, norm + column) : v;
}

#if DOT
// Rounded to the nearest integer, which is then the lower bits, in 8 bits each.
inline uint pack4(const float4 v) {
    const uint4 u = as_uint4(v + 0x1.8p23f) & 0xffu;
    return u.x | u.y << 8 | u.z << 16 | u.w << 24;
}
inline float largest4(const float4 v) { return fmax(fmax(fabs(v.x), fabs(v.y)), fmax(fabs(v.z), fabs(v.w))); }
#endif

// Puts the work-group's activations into local memory (rounded, with DOT), and the squares of x. For all work-items.
//   xq     int4 [columns / 32][2], the words that a lane's columns make;  scales  float [columns / 32]
//   squares  float [WARPS], the sum of squares of what each warp has met
inline void stage(__global const float* x, __global const float* norm, const int columns, const bool normed,
                  __local int* xq, __local float* scales, __local float* squares) {
    float square = 0.0f;
#if DOT
#pragma unroll 4
    for (int first = 0; first < columns / 8; first += WARPS * WARP) {
        const int at = first + get_local_id(0), c = min(at, columns / 8 - 1), g = c / 4, j = c % 4;
        float squares_here = 0.0f;
        const float4 a = load_columns(x, norm, 32 * g + 4 * j, normed, &squares_here);
        const float4 b = load_columns(x, norm, 32 * g + 4 * j + 16, normed, &squares_here);
        square += at == c ? squares_here : 0.0f;
        float largest = fmax(largest4(a), largest4(b));
        largest = fmax(largest, shuffle_xor(largest, 1));
        largest = fmax(largest, shuffle_xor(largest, 2));
        const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        if (at != c) continue;
        xq[8 * g + j / 2 * 4 + j % 2] = (int)pack4(a * inverse);
        xq[8 * g + j / 2 * 4 + j % 2 + 2] = (int)pack4(b * inverse);
        if (j == 0) scales[g] = largest / 127.0f;
    }
#else
    if (normed)
        for (int c = get_local_id(0); c < columns; c += WARPS * WARP) square += x[c] * x[c];
#endif
    if (normed) {
        square = warp_sum(square);
        if (get_local_id(0) % WARP == 0) squares[get_local_id(0) / WARP] = square;
    }
    if (DOT || normed) barrier(CLK_LOCAL_MEM_FENCE);
}

// Sums 4 values over the 8 lanes of equal lane % 4. The lane ends with that of row `sum4_index(lane)`, as lane ^ 4 does.
inline float sum4(const float4 v, const int lane) {
    const bool high = lane & 16, low = lane & 8;
    const float2 kept = high ? v.zw : v.xy, given = high ? v.xy : v.zw;
    const float2 a = kept + (float2)(shuffle_xor(given.x, 16), shuffle_xor(given.y, 16));
    const float b = (low ? a.y : a.x) + shuffle_xor(low ? a.x : a.y, 8);
    return b + shuffle_xor(b, 4);
}
inline int sum4_index(const int lane) { return lane % 4 * 4 + (lane >> 4) * 2 + ((lane >> 3) & 1); }

// The rows of `count` tiles, whose sums are there: slots first .. first + count - 1 of each of the team's warps.
inline void finish(__local const float* sums, const float scale, __global float* out, const int rows, const bool gated,
                   const bool add, const int first, const int count, const int first_unit, const int unit_stride,
                   const int warps, const int member) {
    const int tiles = gated ? 2 : 1;
    for (int i = member * WARP + get_local_id(0) % WARP; i < count / tiles * 16; i += warps * WARP) {
        const int tile = first + i / 16 * tiles, row = (first_unit + tile / tiles * unit_stride) * 16 + i % 16;
        float y[2] = {0.0f, 0.0f};
#pragma unroll
        for (int t = 0; t < tiles; ++t)
            for (int k = 0; k < warps; ++k) y[t] += sums[(k * SLOTS + (tile + t) % SLOTS) * 16 + i % 16];
        if (row >= rows) continue;
        float value = y[0] * scale;
#ifdef GATE
        if (gated) value = GATE_VALUE(value, exp) * (y[1] * scale);
#endif
        out[row] = add ? out[row] + value : value;
    }
}

// out = epilogue(W rms_norm(x)) for the units from first_unit on, every unit_stride-th: the share of a team of `warps` warps,
// of which this is `member`. For all work-items of a group. `barrier_id` is the team's own, from 1 on. turn: of load_turn.
// rows: of the output; scratch: PRODUCT_FLOATS of the whole group.
inline void product(__global const uchar* weight, __global const float* x, __global const float* norm, __global float* out,
                    const int columns, const int rows, const bool gated, const bool normed, const bool add, const int n_units,
                    const int first_unit, const int unit_stride, const int warps, const int member, const int barrier_id,
                    weight_turn* turn, __local float* scratch) {
    const int lane = get_local_id(0) % WARP, h = lane % 8 / 4;
    const walk w = walk_of(columns, gated, n_units, first_unit, unit_stride, warps, member);
    __local float* sums = scratch + WARPS + (barrier_id - 1) * warps * SLOTS * 16;  // [warps][SLOTS][16]
    __local int* xq = (__local int*)(scratch + WARPS + SLOTS * 16 * WARPS);
    __local float* scales = scratch + WARPS + SLOTS * 16 * WARPS + columns / 4;
    stage(x, norm, columns, normed, xq, scales, scratch);
    float scale = 1.0f;
    if (normed) {
        float sum = 0.0f;
        for (int i = 0; i < WARPS; ++i) sum += scratch[i];
        scale = 1.0f / sqrt(sum / columns + EPS);
    }
    int part = 0, first_tile = 0, finished = 0;
    float acc[PIECES][4];
    for (int t = 0; t < w.turns; ++t) {
        const int next_part = part + 1 == w.parts ? 0 : part + 1;
        const int next_tile = next_part == 0 ? first_tile + w.turn_tiles : first_tile;
#pragma unroll
        for (int i = 0; i < w.turn_tiles; ++i) {
            if (part == 0) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f;
#pragma unroll
            for (int s = 0; s < w.part_steps; ++s) {
                const int at = w.first_group + (part * w.part_steps + s) * w.step_groups;
                const int g = IS_WHOLE(&w) ? at : min(at, columns / 32 - 1);
                const piece* p = turn->pieces + i * w.part_steps + s;
#if DOT
                multiply_piece(p, *(__local const int4*)(xq + 8 * g + 4 * h), scales[g], acc[i]);
#else
                float v[16], square = 0.0f;
#pragma unroll
                for (int b = 0; b < 4; ++b)
                    vstore4(load_columns(x, norm, 32 * g + 8 * h + b / 2 * 16 + b % 2 * 4, normed, &square), b, v);
                multiply_piece(p, v, acc[i]);
#endif
            }
            load_pieces(turn, weight, &w, next_tile, next_part, i);
        }
        if (next_part == 0) {
#pragma unroll
            for (int i = 0; i < w.turn_tiles; ++i) {
                const float sum = sum4((float4)(acc[i][0], acc[i][1], acc[i][2], acc[i][3]), lane);
                const int slot = (first_tile + i) % SLOTS;
                if (!(lane & 4) && first_tile + i < w.tiles) sums[(member * SLOTS + slot) * 16 + sum4_index(lane)] = sum;
            }
        }
        part = next_part;
        first_tile = next_tile;
        // At most PIECES more tiles fit beside those that wait.
        const int there = min(first_tile, w.tiles);
        if (there - finished <= SLOTS - PIECES && t + 1 < w.turns) continue;
        const int count = there - finished - (gated ? (there - finished) % 2 : 0);
        team_barrier(barrier_id, warps * WARP);
        finish(sums, scale, out, rows, gated, add, finished, count, first_unit, unit_stride, warps, member);
        finished += count;
        if (t + 1 < w.turns) team_barrier(barrier_id, warps * WARP);
    }
}

// Decode attention of one work-group, for a KV head and a split of the keys: shared by nvidia/attention_decode.cl and
// nvidia/persistent_layers.cl. Formula, layouts and key splits as in cpu/attention_decode.cl.
//
// The warps take the split's keys in turns, in tiles of 16. Each warp has an online-softmax state, so the loop needs no barrier.
// With wide heads two warps share a tile (TILE_WARPS): each warp has all scores, and half of the values' dimensions. A warp copies
// the next tile's keys into its local memory and loads the values into registers as soon as the previous tile's have been used. For
// the first tile, the key copy and a prefetch of the values into the L2 cache begin before the queries arrive. The matrix units do
// both products (mma.sync), with keys and values as the left operand. With g = lane / 4, t = lane % 4:
//
//   keys    fragment rows: keys g and g + 8 of the tile, columns: dimensions, transposed by the read (ldmatrix)
//   values  fragment rows: dimensions 64 h + 8 g + 2 r and + 2 r + 1, columns: keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9. A lane reads 8
//           dimensions of each key, a warp 128 neighbouring bytes of four keys; a byte permutation per register makes the pairs
//
// A query takes two of the right operand's 8 columns: the value rounded to 16 bits, and the rest. The softmax weights take two
// columns, too. For q8_0 see kv_tiles_q8_0.cl. Four queries fill a fragment (a quad), and a lane has scores, maximum, sum and accumulators for query t in each
// quad. At the end a group merges its warps' states. The calling kernel merges the splits' states.
//
// Build: KV (f16, bf16 or q8_0), HEAD_DIM (64, 128 or 256), N_Q_HEADS, N_KV_HEADS, GROUP_SIZE, CAPACITY (a multiple of 16), N_SPLITS,
// SCALE, WARPS; SPLIT_TILES (1): minimum tiles per warp before adding a split. Local memory: attend_space.
#if !defined(KV) || !defined(HEAD_DIM) || !defined(N_Q_HEADS) || !defined(N_KV_HEADS) || !defined(GROUP_SIZE) || \
    !defined(CAPACITY) || !defined(N_SPLITS) || !defined(SCALE) || !defined(WARPS) || !defined(STATE_POSITION)
#error "nvidia/attend.cl needs the build constants KV, HEAD_DIM, N_Q_HEADS, N_KV_HEADS, GROUP_SIZE, CAPACITY, N_SPLITS, SCALE, WARPS and those of the step state"
#endif
#include "common/common.cl"
#include "nvidia/ptx.cl"
#include "nvidia/flag_in_data.cl"
#include "common/online_softmax.cl"
#include "common/attention_mods.cl"
#include "common/kv_address.cl"

#define IN_8_BITS_f16 0
#define IN_8_BITS_bf16 0
#define IN_8_BITS_q8_0 1
#define IN_8_BITS CAT(IN_8_BITS_, KV)
#define MET_f16 f16
#define MET_bf16 bf16
#define MET_q8_0 f16
#define MET CAT(MET_, KV)  // the type in which keys and values meet queries and weights

#define LOCAL_SIZE (WARP * WARPS)
#define KEY_TILE 16  // keys per tile
#ifndef ATTEND_WARPS
#define ATTEND_WARPS WARPS  // tiles in work at once per group
#endif
#ifndef SPLIT_TILES
#define SPLIT_TILES 1
#endif
#define SPLIT_KEYS (ATTEND_WARPS * KEY_TILE * SPLIT_TILES)
#define TILE_WARPS (WARPS / ATTEND_WARPS)  // warps per tile; each warp has OWN_DIMS neighbouring value dimensions
#define OWN_DIMS (HEAD_DIM / TILE_WARPS)
#define QUADS ((GROUP_SIZE + 3) / 4)
#define STEPS (HEAD_DIM / 16)  // products per quad and key tile
#define VALUE_STEPS (OWN_DIMS / 16)  // products per quad and a warp's values
#define WEIGHT_UNIT 16384.0f  // weights are at most 1: this unit keeps small weights from rounding to zero in float16

#define QUERY_FLOATS (QUADS * 4 * HEAD_DIM)  // query fragments
// Per tile: first the keys, at the end accumulators [GROUP_SIZE][HEAD_DIM], m and l for each query.
#define KEY_TILE_FLOATS (KEY_TILE * HEAD_DIM / 2)
#define STATE_FLOATS (GROUP_SIZE * (HEAD_DIM + 2))
// The new key [HEAD_DIM] in 16 bits; with q8_0, whose groups need all of a row first, the new key and value in float32.
#define NEW_FLOATS (IN_8_BITS ? 2 * HEAD_DIM : HEAD_DIM / 2)
#define WARP_FLOATS MAX(KEY_TILE_FLOATS, (STATE_FLOATS + 3) / 4 * 4)

#if HEAD_DIM % 64 || HEAD_DIM > 256
#error "nvidia/attend.cl: HEAD_DIM is 64, 128 or 256"
#endif

// A group's KV split: number `split` of n_splits. Without keys if split >= n_splits.
typedef struct {
    int head, split, n_splits, position, first, end;
    bool has_new;  // the group appends the new position's key and value
    size_t row;    // cache row where the head begins
#if MODS_BY_SEQUENCE
    int sequence;
#endif
} kv_split;
#if MODS_BY_SEQUENCE
#define SEQUENCE_OF(s) ((s)->sequence)
#else
#define SEQUENCE_OF(s) 0
#endif

inline kv_split split_of_keys(const int head, const int split, __global const int* state MOD_PARAMS) {
    const int position = state[STATE_POSITION], kv_len = position + 1;
    // The splits share the keys after the hidden beginning (hidden by mask_mod).
    const int visible_from = first_visible(MOD_SEQUENCE(state), head * GROUP_SIZE, GROUP_SIZE, (int2)(position), kv_len, KEY_TILE MOD_ARGS);
    kv_split s = {head, split, 1, position, visible_from, kv_len, true, (size_t)head * CAPACITY};
#if MODS_BY_SEQUENCE
    s.sequence = MOD_SEQUENCE(state);
#endif
    if (visible_from >= kv_len) return s;  // one split, without keys
    // Only as many splits as have tiles for all warps: a short context needs no merge.
    s.n_splits = min(N_SPLITS, (kv_len - visible_from + SPLIT_KEYS - 1) / SPLIT_KEYS);
    const int per_split = (kv_len - visible_from + s.n_splits * KEY_TILE - 1) / (s.n_splits * KEY_TILE) * KEY_TILE;
    s.first = visible_from + split * per_split;
    s.end = min(kv_len, s.first + per_split);
    s.has_new = s.first <= position && position < s.end;
    return s;
}

// RMS norms for a head's queries and key, before rotation: weights, 0 for no norm.
typedef struct {
    __global const float* heads;  // [2][HEAD_DIM], for each query head, for each key head
    __global const float* q;      // [N_Q_HEADS][HEAD_DIM], for all query heads together
    __global const float* k;      // [N_KV_HEADS][HEAD_DIM], for all key heads together
} qk_norms;
#ifndef NORM_EPS
#define NORM_EPS 0.0f
#endif

// A group's local memory.
typedef struct {
    __local float* queries;  // QUERY_FLOATS
    __local float* new_rows;  // NEW_FLOATS, in the group that appends a key and a value
    __local float* warps;    // ATTEND_WARPS times WARP_FLOATS, `stride` floats apart
    int stride;
    __local float* squares;  // [2][WARPS], for norms over all heads
#if CHAINED
    volatile __global const uint* done;  // queries have arrived when *done equals `count`
    uint count;
#endif
} attend_space;

#define VALUE_KEY(lane, i) ((lane) % 4 * 2 + (i) % 2 + (i) / 2 * 8)  // key in the tile: the lane's i-th of four

// A tile's values in registers: all pieces of 64 dimensions, or fewer at a time if accumulators need the registers.
#define VALUE_PIECES (WARPS <= 4 || QUADS * OWN_DIMS <= 128 ? OWN_DIMS / 64 : 1)
#define VALUES_AHEAD (VALUE_PIECES == OWN_DIMS / 64)  // request the next tile's values as soon as the current values have been used
// The warp's part of a tile, the tile's number in the group, and the barrier between a tile's warps.
#if TILE_WARPS == 1
#define PART_OF_TILE 0
#define TILE_OF(lid) ((lid) / WARP)
#define tile_sync() warp_sync()
#else
#define PART_OF_TILE (this_item() / WARP / ATTEND_WARPS)
#define TILE_OF(lid) ((lid) / WARP % ATTEND_WARPS)
#define tile_sync() named_barrier(1 + TILE_OF(this_item()), TILE_WARPS * WARP)
#endif

#if IN_8_BITS
#include "nvidia/kv_tiles_q8_0.cl"
#else
#include "nvidia/kv_tiles_16_bit.cl"
#endif

// A tile of keys from `first` on, and its visibility (TILE_*); first >= s->end if there is no tile.
typedef struct {
    int first, seen;
} visible_tile;

// Returns the warp's first visible tile from key j on.
inline visible_tile tile_from(const kv_split* s, const int j MOD_PARAMS) {
    visible_tile tile = {j, TILE_EMPTY};
    for (; tile.first < s->end; tile.first += ATTEND_WARPS * KEY_TILE) {
        const int end = min(tile.first + KEY_TILE, s->end);
        tile.seen = tile_class(SEQUENCE_OF(s), s->head * GROUP_SIZE, GROUP_SIZE, (int2)(s->position), tile.first, end MOD_ARGS);
        if (tile.seen != TILE_EMPTY) break;
    }
    return tile;
}

// Element 2 r of a and b (or element 2 r + 1) in a single word.
inline uint lower_halves(const uint a, const uint b) { return permute(a, b, 0x5410); }
inline uint upper_halves(const uint a, const uint b) { return permute(a, b, 0x7632); }

// A number rounded to 16 bits, in the lower half, and the rest in the upper half.
inline uint two_parts(const float v) {
    const uint rounded = CAT(narrow_, MET)(v, 0.0f) & 0xffffu;
    return CAT(narrow_, MET)(CAT(widen_, MET)(rounded).x, v - CAT(widen_, MET)(rounded).x);
}

// Stores a query element in the fragments for the key products: uint2 [QUADS][STEPS][WARP].
inline void put_query(__local float* queries, const int query, const int dim, const float v) {
    const int lane = query % 4 * 8 + QUERY_PAIR(dim), half_word = QUERY_HALF(dim);
    __local ushort* at = (__local ushort*)queries + ((query / 4 * STEPS + dim / 16) * WARP + lane) * 4 + half_word;
    const uint parts = two_parts(v);
    at[0] = (ushort)parts;
    at[4 * 4] = (ushort)(parts >> 16);  // the next column's lane
}

// Computes the warp's state over its keys, left in the tile memory. The first tile, `now`, is already on its way there and to `values`.
inline void attend_keys(const kv_split* s, value_tile* values, visible_tile now, __global const int* state,
                        __global const CAT(KV, _t)* k_cache, __global const CAT(KV, _t)* v_cache, __local float* own,
                        __local const float* queries, const int lane MOD_PARAMS) {
    const int g = lane / 4, t = lane % 4;
    float m[QUADS], l[QUADS];  // l: the lane's keys only
    float4 acc[QUADS][VALUE_STEPS];
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) {
        m[quad] = -INFINITY;
        l[quad] = 0.0f;
#pragma unroll
        for (int i = 0; i < VALUE_STEPS; ++i) acc[quad][i] = (float4)(0.0f);
    }
    while (now.first < s->end) {
        COPY_WAIT(0);
        tile_sync();
        float scores[QUADS][2];  // for keys g and g + 8
        float4 products[QUADS];
        multiply_keys(products, own, queries, lane);
        tile_sync();
        const int key = now.first + g;
        const visible_tile next = tile_from(s, now.first + ATTEND_WARPS * KEY_TILE MOD_ARGS);
        copy_keys(own, s, state, k_cache, next.first, lane);
        if (!VALUES_AHEAD) {
            fetch_values(s, state, v_cache, next.first, lane);
            load_values(values, s, state, v_cache, now.first, lane, 0, VALUE_PIECES);
        }
        uint weights[QUADS][2];
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
            const float4 sums = products[quad];
            const float pair[2] = {sums.x + sums.y, sums.z + sums.w};
            const int query = s->head * GROUP_SIZE + min(quad * 4 + t, GROUP_SIZE - 1);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float score = pair[i];
                bool seen = key + 8 * i < s->end;
#if HAS_SCORE_MOD
                score = score_mod(score, SEQUENCE_OF(s), query, s->position, key + 8 * i MOD_ARGS);
#endif
#if HAS_MASK_MOD
                if (seen && now.seen == TILE_PARTIAL) seen = mask_mod(SEQUENCE_OF(s), query, s->position, key + 8 * i MOD_ARGS);
#endif
                scores[quad][i] = seen ? score : -INFINITY;
            }
            float top = fmax(m[quad], fmax(scores[quad][0], scores[quad][1]));
            for (int other = 4; other < WARP; other *= 2) top = fmax(top, shuffle_xor(top, other));
            const float shrink = softmax_weight(m[quad], top);
            l[quad] *= shrink;
            m[quad] = top;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float weight = softmax_weight(scores[quad][i], top);
                l[quad] += weight;
                weights[quad][i] = transpose_matrix(two_parts(weight * WEIGHT_UNIT));
            }
#pragma unroll
            for (int i = 0; i < VALUE_STEPS; ++i) acc[quad][i] *= shrink;
        }
#pragma unroll
        for (int h = 0; h < OWN_DIMS / 64; ++h) {
            uint4 of[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) of[i] = value_words(values, h % VALUE_PIECES, i);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const uint a = word_of(of[0], r), b = word_of(of[1], r), c = word_of(of[2], r), d = word_of(of[3], r);
                const uint4 pairs = {lower_halves(a, b), upper_halves(a, b), lower_halves(c, d), upper_halves(c, d)};
#pragma unroll
                for (int quad = 0; quad < QUADS; ++quad)
                    CAT(mma_, MET)(&acc[quad][h * 4 + r], pairs, weights[quad][0], weights[quad][1]);
            }
            if (h + VALUE_PIECES < OWN_DIMS / 64)
                load_values(values, s, state, v_cache, now.first, lane, h + VALUE_PIECES, h + VALUE_PIECES + 1);
        }
        if (VALUES_AHEAD)
            load_values(values, s, state, v_cache, next.first, lane, 0, VALUE_PIECES);
        now = next;
    }
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) {
        float sum = l[quad];
        for (int other = 4; other < WARP; other *= 2) sum += shuffle_xor(sum, other);
        const int query = quad * 4 + t;
        if (query >= GROUP_SIZE) continue;
        if (PART_OF_TILE == 0 && g == 0) {
            own[GROUP_SIZE * HEAD_DIM + query] = m[quad];
            own[GROUP_SIZE * (HEAD_DIM + 1) + query] = sum;
        }
#pragma unroll
        for (int i = 0; i < VALUE_STEPS; ++i) {
            const float4 parts = acc[quad][i] * (1.0f / WEIGHT_UNIT);
            vstore2((float2)(parts.x + parts.y, parts.z + parts.w), 0,
                    own + query * HEAD_DIM + PART_OF_TILE * OWN_DIMS + i / 4 * 64 + g * 8 + i % 4 * 2);
        }
    }
}

// Rotates and stores elements `column` and `column` + HEAD_DIM / 2 of a row: a query, the new key, or the new value (not rotated).
inline void put_pair(const new_place* to, const attend_space* space, const int row, const int column, const float2 v,
                     const float c, const float sine) {
    const float2 rotated = (float2)(v.x * c + -v.y * sine, v.y * c + v.x * sine);
    if (row < GROUP_SIZE) {
        put_query(space->queries, row, column, rotated.x * SCALE);
        put_query(space->queries, row, column + HEAD_DIM / 2, rotated.y * SCALE);
        return;
    }
    const bool is_key = row == GROUP_SIZE;
    put_new_pair(to, space->new_rows, is_key, column, is_key ? rotated : v);
}

#define PAIRS_EACH (((GROUP_SIZE + 2) * (HEAD_DIM / 2) + LOCAL_SIZE - 1) / LOCAL_SIZE)  // maximum pairs per work-item
#define ROW_AT(head, row) \
    (((row) < GROUP_SIZE ? (head) * GROUP_SIZE + (row) : N_Q_HEADS + ((row) - GROUP_SIZE) * N_KV_HEADS + (head)) * HEAD_DIM)

// A warp's part of the sum of squares over `count` values of qkv (a multiple of 16).
inline float square_of_all(__global const float* values, const int count, const uint flag, const bool wait, const int lid) {
    const int most = (count + 4 * LOCAL_SIZE - 1) / (4 * LOCAL_SIZE);
    const int own = 4 * lid < count ? (count - 4 * lid + 4 * LOCAL_SIZE - 1) / (4 * LOCAL_SIZE) : 0;
    uint4 words[(MAX(N_Q_HEADS, N_KV_HEADS) * HEAD_DIM + 4 * LOCAL_SIZE - 1) / (4 * LOCAL_SIZE)];
    receive4(words, values + 4 * lid, 8 * LOCAL_SIZE, 4 * LOCAL_SIZE, own, most, flag, wait);
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < most; ++i) {
        const float4 v = values_of(words[i]);
        if (i < own) square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    return warp_sum(square);
}

inline float norm_scale(const float square, const int count) { return 1.0f / sqrt(NO_OVERFLOW(square) / count + NORM_EPS); }

// Stores queries, key and value, with norms: a warp handles a row.
inline void put_normed_rows(const kv_split* s, __global const float* qkv, const uint flag, const bool wait,
                            __global const float* rope, const new_place* to, const qk_norms* norms, const int n_rows,
                            const attend_space* space) {
    const int lid = this_item(), lane = lid % WARP;
    float q_scale = 1.0f, k_scale = 1.0f;
    if (norms->q) {
        const float q_square = square_of_all(qkv, N_Q_HEADS * HEAD_DIM, flag, wait, lid);
        const float k_square = square_of_all(qkv + N_Q_HEADS * HEAD_DIM, N_KV_HEADS * HEAD_DIM, flag, wait, lid);
        if (lane == 0) {
            space->squares[lid / WARP] = q_square;
            space->squares[WARPS + lid / WARP] = k_square;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        float q_sum = 0.0f, k_sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            q_sum += space->squares[i];
            k_sum += space->squares[WARPS + i];
        }
        q_scale = norm_scale(q_sum, N_Q_HEADS * HEAD_DIM);
        k_scale = norm_scale(k_sum, N_KV_HEADS * HEAD_DIM);
    }
    for (int row = lid / WARP; row < n_rows; row += WARPS) {
        const bool is_query = row < GROUP_SIZE, is_value = row > GROUP_SIZE;
        const int at = ROW_AT(s->head, row);
        __global const float* weights = norms->heads ? norms->heads + (is_query ? 0 : HEAD_DIM)
                                        : is_query   ? norms->q + at
                                                     : norms->k + s->head * HEAD_DIM;
        float c[HEAD_DIM / 64], sine[HEAD_DIM / 64];
        float2 weight[HEAD_DIM / 64];
        uint words[2][HEAD_DIM / 64];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 64; ++i) {
            const int column = lane + i * WARP;
            c[i] = rope[column];
            sine[i] = rope[HEAD_DIM / 2 + column];
            weight[i] = is_value ? (float2)(1.0f) : (float2)(weights[column], weights[column + HEAD_DIM / 2]);
        }
        receive_rows(words[0], words[1], qkv + at + lane, qkv + at + lane + HEAD_DIM / 2, HEAD_DIM / 64, flag, wait);
        float scale = is_value ? 1.0f : is_query ? q_scale : k_scale;
        if (norms->heads) {
            float square = 0.0f;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 64; ++i) {
                const float2 v = (float2)(value_of(words[0][i]), value_of(words[1][i]));
                square += v.x * v.x + v.y * v.y;
            }
            square = warp_sum(square);
            if (!is_value) scale = norm_scale(square, HEAD_DIM);
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 64; ++i) {
            const float2 v = (float2)(value_of(words[0][i]), value_of(words[1][i])) * scale * weight[i];
            put_pair(to, space, row, lane + i * WARP, v, c[i], sine[i]);
        }
    }
}

// Computes the states of a group's warps over its KV split, left in `space` for warps_state. qkv: the step's row, with flags if
// `wait`. norms: 0 for none. Called by all work-items in a group.
inline void attend(const kv_split* s, __global const float* qkv, const uint flag, const bool wait,
                   __global const float* rope, __global const int* state, __global CAT(KV, _t)* k_cache,
                   __global CAT(KV, _t)* v_cache, const qk_norms* norms, const attend_space* space MOD_PARAMS) {
    const int lid = this_item(), lane = lid % WARP, head = s->head, position = s->position;

    // The warp's first tile, except for a key and a value that arrive later.
    __local float* own = space->warps + TILE_OF(lid) * space->stride;
    const visible_tile now = tile_from(s, s->first + TILE_OF(lid) * KEY_TILE MOD_ARGS);
    copy_keys(own, s, state, k_cache, now.first, lane);
    value_tile values;
    // Stored values need not wait for the new value.
    const bool early = VALUES_AHEAD && !wait && now.first + KEY_TILE <= position;
    if (early) {
        load_values(&values, s, state, v_cache, now.first, lane, 0, VALUE_PIECES);
    } else {
        fetch_values(s, state, v_cache, now.first, lane);
    }
#if CHAINED
    wait_until(space->done, space->count);
#endif

    // The head's queries, and the new key and value in the split with the new position. An item has two elements that rotate
    // together.
    const int row_new = kv_row(state, position);
    const new_place to = place_of_new(k_cache, v_cache, s->row + row_new);
    const int n_rows = s->has_new ? GROUP_SIZE + 2 : GROUP_SIZE;
    if (norms) {
        put_normed_rows(s, qkv, flag, wait, rope, &to, norms, n_rows, space);
    } else if (!wait) {  // an item requests all of its values at once
        float2 x[PAIRS_EACH], turn[PAIRS_EACH];
#pragma unroll
        for (int i = 0; i < PAIRS_EACH; ++i) {
            const int pair = min(lid + i * LOCAL_SIZE, n_rows * (HEAD_DIM / 2) - 1), column = pair % (HEAD_DIM / 2);
            __global const float* from = qkv + ROW_AT(head, pair / (HEAD_DIM / 2)) + column;
            x[i] = (float2)(load_shared_float(from), load_shared_float(from + HEAD_DIM / 2));
            turn[i] = (float2)(rope[column], rope[HEAD_DIM / 2 + column]);
        }
#pragma unroll
        for (int i = 0; i < PAIRS_EACH; ++i) {
            const int pair = lid + i * LOCAL_SIZE;
            if (pair >= n_rows * (HEAD_DIM / 2)) break;
            const float2 v = (float2)(value_of(as_uint(x[i].x)), value_of(as_uint(x[i].y)));
            put_pair(&to, space, pair / (HEAD_DIM / 2), pair % (HEAD_DIM / 2), v, turn[i].x, turn[i].y);
        }
    } else {
        for (int i = lid; i < n_rows * (HEAD_DIM / 2); i += LOCAL_SIZE) {
            const int row = i / (HEAD_DIM / 2), column = i % (HEAD_DIM / 2);
            const float c = rope[column], sine = rope[HEAD_DIM / 2 + column];
            __global const float* x = qkv + ROW_AT(head, row) + column;
            put_pair(&to, space, row, column, receive2(x, x + HEAD_DIM / 2, flag, wait), c, sine);
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
#if IN_8_BITS
    if (s->has_new) {
        quantize_new(&to, space->new_rows, lid);
        barrier(CLK_GLOBAL_MEM_FENCE);
    }
#endif
    if (VALUES_AHEAD && !early) load_values(&values, s, state, v_cache, now.first, lane, 0, VALUE_PIECES);
    if (s->has_new && now.first == position / KEY_TILE * KEY_TILE) put_key(own, &to, space->new_rows, position % KEY_TILE, lane);
    attend_keys(s, &values, now, state, k_cache, v_cache, own, space->queries, lane MOD_ARGS);
    barrier(CLK_LOCAL_MEM_FENCE);
}

#include "nvidia/merge_states.cl"

// The warps in nvidia/attention_prefill_arrays_wgmma.cl that ask the copy engine (tensor_map.cl) for queries, keys and values in arrays: a
// warp each for queries, keys and values. They request the next item's data during the current item's products. The key warp alone
// asks which tiles a mask hides. Include after that file's constants and prefill_items.cl.
//
// A group's maps, N_MAPS times TENSOR_MAP_BYTES, are its part of tensor_maps, which has room for all groups (groups,
// batch).
#include "nvidia/tensor_map.cl"
#define COPY_WARPS 2
#define PART_KEYS 64  // keys that always lie in a single page
#define N_MAPS 3
#define COPY_ARRIVALS 1  // arrivals at the barrier of a complete tile

// The place of the tiles for STAGES stages, and the first stage's barriers: full, empty.
typedef struct {
    uint tiles, full, empty;
} copy_place;

// The keys or the values: [batches or pages][heads][CAPACITY rows][WIDTH].
#ifdef KV_PAGE
#define BLOCK_STRIDE(of) ((long)(PAGE_ROWS) * ROW_STRIDE(of))
#else
#define BLOCK_STRIDE(of) ((long)state[STRIDES + (of)])
#endif
inline array_form form_of(const int of, __global const int* state) {
    const array_form form = {WIDTH, PART_KEYS, {CAPACITY, N_KV_HEADS, ARRAY_BLOCKS},
                             {2 * (long)ROW_STRIDE(of), 2 * (long)state[STRIDES + (of) + 1], 2 * BLOCK_STRIDE(of)}};
    return form;
}

// Makes a warp's map, number `own` in its group, and returns its address.
inline __global char* map_of(__global char* tensor_maps, const uint fields, const int own, __global const void* array,
                             const array_form form, const int batch, const int lane) {
    const int group = batch * get_num_groups(0) + get_group_id(0);
    __global char* map = tensor_maps + (group * N_MAPS + own) * TENSOR_MAP_BYTES;
    make_tensor_map(map, fields + own * TENSOR_MAP_BYTES, array, form, lane);
    return map;
}

// Copies the queries of each item, 64 rows for each of two warpgroups: columns 64 c to 64 c + 63 of row j go to (64 c + j) 128;
// rows past the last row become zero. Called by one warp.
inline void copy_queries(const copy_place to, __global const int* state, __global const CAT(KV, _t)* queries,
                         __global const int* ranges, const int batch, const int lane, __global char* tensor_maps,
                         const uint fields) {
    const int n = state[STATE_N_TOKENS];
    const long head_stride = state[STRIDES + QUERIES + 1], batch_stride = state[STRIDES + QUERIES];
    const array_form form = {WIDTH, 64, {n, N_Q_HEADS, get_num_groups(2)},
                             {2 * (long)ROW_STRIDE(QUERIES), 2 * head_stride, 2 * batch_stride}};
    __global char* map = map_of(tensor_maps, fields, COPY_WARPS, queries, form, batch, lane);
    uint parity = 1;
    for (int turn = 0;; ++turn) {
        const item it = TAKE(turn);
        if (it.t0 < 0) return;
        for (int team = 0; team < 2; ++team) {
            mbarrier_wait(to.empty + 8 * team, parity);
            if (lane == 0) {
                mbarrier_expect(to.full + 8 * team, 64 * HEAD_DIM * 2);
#pragma unroll
                for (int c = 0; c < HEAD_DIM / 64; ++c)
                    copy_box(to.tiles + (team * (HEAD_DIM / 64) + c) * 64 * 128, map, c * 64, it.t0 + team * 64, it.head, batch,
                             to.full + 8 * team);
            }
        }
        parity ^= 1;
    }
}

// fields: local memory, N_MAPS times TENSOR_MAP_BYTES.
inline void copy_tiles(const copy_place keys, const copy_place values, __local tile* tiles, __global const int* state,
                       __global const CAT(KV, _t)* k_cache, __global const CAT(KV, _t)* v_cache, __global const int* ranges,
                       const int batch, const int warp, const int lane, __global char* tensor_maps, const uint fields MOD_PARAMS) {
    const int position = state[STATE_POSITION], n = state[STATE_N_TOKENS];
    const bool of_keys = warp < COPY_WARPS / 2;
    const copy_place to = of_keys ? keys : values;
    if (warp >= COPY_WARPS) return;
    const array_form form = form_of(of_keys ? KEYS : VALUES, state);
    __global char* map = map_of(tensor_maps, fields, warp, of_keys ? k_cache : v_cache, form, batch, lane);
    int stage = 0;
    uint parity = 1;
    item next_item = TAKE(0);
    for (int turn = 1; next_item.t0 >= 0; ++turn) {
        const item it = next_item;
        next_item = TAKE(turn);  // requested before it is needed
        const int kv_head = it.head / (N_Q_HEADS / N_KV_HEADS);
        const int end = POSITION_OF(it) + min(it.t0 + BLOCK_M, END_OF(it));
        const int2 group_rows = (int2)(POSITION_OF(it) + it.t0, end - 1);
        const int sequence = batch + MOD_SEQUENCE(STATE_OF(it));
        kv_block_ranges left = RANGES_OF(sequence, it.head, it.t0 / BLOCK_M, group_rows, end);
        tile_coord at = {0, (int2)(0)};
        at = tile_after(at, &left, sequence, it.head, group_rows MOD_ARGS);
        int last;
        do {  // at least once, even without a key: the consumers wait for a tile
            const int n_keys = at.range.y > 0 ? min(BLOCK_N, at.range.y - at.j) : 0;
            int rows[BLOCK_N / PART_KEYS], blocks[BLOCK_N / PART_KEYS];  // the places of the parts; outside the array: none
#pragma unroll
            for (int i = 0; i < BLOCK_N / PART_KEYS; ++i) {
                const int key = at.j + i * PART_KEYS;
#ifdef KV_PAGE
                rows[i] = key % KV_PAGE;
                blocks[i] = n_keys > i * PART_KEYS ? kv_page(state, key) : -1;
#else
                rows[i] = key;
                blocks[i] = n_keys > i * PART_KEYS ? batch : -1;
#endif
            }
            tile_coord next = at;
            if (n_keys > 0) next = tile_after(at, &left, sequence, it.head, group_rows MOD_ARGS);
            last = n_keys == 0 || next.range.y == 0;
            mbarrier_wait(to.empty + 8 * stage, parity);
            if (warp == 0 && lane == 0) {
                tiles[stage].first = at.j;
                tiles[stage].n_keys = n_keys;
                tiles[stage].seen_as = n_keys > 0 ? class_of(at, sequence, it.head, group_rows MOD_ARGS) : TILE_PARTIAL;
                tiles[stage].last = last;
            }
            if (lane == 0) {
                mbarrier_expect(to.full + 8 * stage, TILE_BYTES);
#pragma unroll
                for (int i = 0; i < BLOCK_N / PART_KEYS; ++i)
#pragma unroll
                    for (int c = 0; c < HEAD_DIM / 64; ++c)
                        copy_box(to.tiles + stage * TILE_BYTES + (c * BLOCK_N + i * PART_KEYS) * 128, map, c * 64, rows[i], kv_head,
                                 blocks[i], to.full + 8 * stage);
            }
            at = next;
            if (++stage == STAGES) {
                stage = 0;
                parity ^= 1;
            }
        } while (!last);
    }
}

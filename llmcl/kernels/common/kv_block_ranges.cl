// Which keys the queries of a group see, as ranges of them. With KV_BLOCK_RANGES they are those of a BlockMask
// (attention/kv_block_ranges.py), one int buffer on the device:
//
//   ranges = int4 { first | partial, end, more, at } for each group of BLOCK_M queries, then int2 { first | partial, end }
//
// The first range of the group is its keys from `first`, a multiple of 16, to before `end`; with partial, 1, only as far as
// mask_mod lets them be seen. `more` ranges follow, in ascending order, the first of them the int2 number `at` of the buffer.
// A group without keys has the range (0, 0). Build constants with KV_BLOCK_RANGES: BATCH_RECORDS, HEAD_RECORDS and GROUP_RECORDS,
// how far apart the records of neighbouring batches, heads and groups are: 0 where they share one.
// Without KV_BLOCK_RANGES there is one range, and mask_mod is asked of every tile of it. After attention_mods.cl.
#if KV_BLOCK_RANGES && (!defined(BATCH_RECORDS) || !defined(HEAD_RECORDS) || !defined(GROUP_RECORDS))
#error "ranges of keys need the build constants BATCH_RECORDS, HEAD_RECORDS and GROUP_RECORDS"
#endif

// What is left of a group's ranges; the next of them is there before it is needed.
typedef struct {
    int2 next;
    int more;
    __global const int2* rest;
} kv_block_ranges;

// RANGES_OF: the ranges of a group; without KV_BLOCK_RANGES one, of the keys before `end`, which the group's last row sees. q as
// for tile_class.
#if KV_BLOCK_RANGES
inline kv_block_ranges ranges_at(__global const int* ranges, const int number) {
    const int4 record = ((__global const int4*)ranges)[number];
    kv_block_ranges found = {record.xy, record.z, (__global const int2*)ranges + record.w};
    return found;
}
#define RANGES_OF(batch, head, group, q, end) \
    ranges_at(ranges, (batch) * (BATCH_RECORDS) + (head) * (HEAD_RECORDS) + (group) * (GROUP_RECORDS))
#else
inline kv_block_ranges one_range(const int first, const int end) {
    kv_block_ranges found = {(int2)(first, end), 0, 0};
    return found;
}
#define RANGES_OF(batch, head, group, q, end) one_range(first_visible(batch, head, 1, q, end, BLOCK_N MOD_ARGS), end)
#endif

// The next range, (0, 0) after the last.
inline int2 take_range(kv_block_ranges* ranges) {
    const int2 range = ranges->next;
    ranges->next = ranges->more > 0 ? *ranges->rest : (int2)(0);
    --ranges->more;
    ++ranges->rest;
    return range;
}

#define RANGE_FIRST(range) ((range).x & ~1)

// Of keys kv_first to before kv_end, in a range: TILE_*; q as for tile_class.
inline int class_in_range(const int2 range, const int batch, const int head, const int2 q, const int kv_first,
                          const int kv_end MOD_PARAMS) {
#if KV_BLOCK_RANGES
    return range.x & 1 ? TILE_PARTIAL : TILE_FULL;
#else
    return tile_class(batch, head, 1, q, kv_first, kv_end MOD_ARGS);
#endif
}

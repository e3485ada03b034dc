// The keys seen by a group of queries, as ranges. With KV_BLOCK_RANGES the ranges come from a BlockMask
// (attention/kv_block_ranges.py), in one int buffer on the device:
//
//   ranges = int4 { first | partial, end, more, at } for each group of BLOCK_M queries, then int2 { first | partial, end }
//
// The group's first range covers the keys from `first`, a multiple of 16, to before `end`. With partial = 1, mask_mod decides about
// each key in the range. `more` ranges follow in ascending order, beginning with int2 number `at` in the buffer. A group without
// keys has the range (0, 0). Build constants with KV_BLOCK_RANGES: BATCH_RECORDS, HEAD_RECORDS and GROUP_RECORDS, the distances
// between records of neighbouring batches, heads and groups; 0 if they share a record.
// Without KV_BLOCK_RANGES there is a single range, and mask_mod decides about every tile. Include after attention_mods.cl.
#if KV_BLOCK_RANGES && (!defined(BATCH_RECORDS) || !defined(HEAD_RECORDS) || !defined(GROUP_RECORDS))
#error "ranges of keys need the build constants BATCH_RECORDS, HEAD_RECORDS and GROUP_RECORDS"
#endif

// BIDIRECTIONAL: without KV_BLOCK_RANGES, queries see all keys of their step, and not only keys up to their own position.
#ifndef BIDIRECTIONAL
#define BIDIRECTIONAL 0
#endif
#define ALL_OF_RANGE (KV_BLOCK_RANGES || BIDIRECTIONAL)  // rows see all keys of their ranges
#define LAST_OF(last, n) (BIDIRECTIONAL ? (n) : (last))  // the step's row after the last row whose key a group sees

// The remaining ranges of a group. The next range is loaded ahead of use.
typedef struct {
    int2 next;
    int more;
    __global const int2* rest;
} kv_block_ranges;

// RANGES_OF: the ranges of a group. Without KV_BLOCK_RANGES a single range, up to `end`, which the group's last row sees. q as in
// tile_class.
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

// Returns the next range, (0, 0) after the last.
inline int2 take_range(kv_block_ranges* ranges) {
    const int2 range = ranges->next;
    ranges->next = ranges->more > 0 ? *ranges->rest : (int2)(0);
    --ranges->more;
    ++ranges->rest;
    return range;
}

#define RANGE_FIRST(range) ((range).x & ~1)

// Classifies keys kv_first to before kv_end in a range as TILE_*; q as in tile_class.
inline int class_in_range(const int2 range, const int batch, const int head, const int2 q, const int kv_first,
                          const int kv_end MOD_PARAMS) {
#if KV_BLOCK_RANGES
    return range.x & 1 ? TILE_PARTIAL : TILE_FULL;
#else
    return tile_class(batch, head, 1, q, kv_first, kv_end MOD_ARGS);
#endif
}

// Which keys the queries of a group see, as runs of them. With KEY_RUNS they are those of a BlockMask (attention/key_runs.py), one
// int buffer on the device:
//
//   runs = int4 { first | partial, end, more, at } for each group of BLOCK_M queries, then int2 { first | partial, end }
//
// The first run of the group is its keys from `first`, a multiple of 16, to before `end`; with partial, 1, only as far as
// mask_mod lets them be seen. `more` runs follow, in ascending order, the first of them the int2 number `at` of the buffer.
// A group without keys has the run (0, 0). Build constants with KEY_RUNS: BATCH_RECORDS, HEAD_RECORDS and GROUP_RECORDS, how far
// apart the records of neighbouring batches, heads and groups are: 0 where they share one.
// Without KEY_RUNS there is one run, and mask_mod is asked of every tile of it. After attention_mods.cl.
#if KEY_RUNS && (!defined(BATCH_RECORDS) || !defined(HEAD_RECORDS) || !defined(GROUP_RECORDS))
#error "runs of keys need the build constants BATCH_RECORDS, HEAD_RECORDS and GROUP_RECORDS"
#endif

// What is left of a group's runs; the next of them is there before it is needed.
typedef struct {
    int2 next;
    int more;
    __global const int2* rest;
} key_runs;

// RUNS_OF: the runs of a group; without KEY_RUNS one, of the keys before `end`, which the group's last row sees. q as for
// tile_class.
#if KEY_RUNS
inline key_runs runs_at(__global const int* runs, const int number) {
    const int4 record = ((__global const int4*)runs)[number];
    key_runs found = {record.xy, record.z, (__global const int2*)runs + record.w};
    return found;
}
#define RUNS_OF(batch, head, group, q, end) \
    runs_at(runs, (batch) * (BATCH_RECORDS) + (head) * (HEAD_RECORDS) + (group) * (GROUP_RECORDS))
#else
inline key_runs one_run(const int first, const int end) {
    key_runs found = {(int2)(first, end), 0, 0};
    return found;
}
#define RUNS_OF(batch, head, group, q, end) one_run(first_visible(batch, head, 1, q, end, BLOCK_N MOD_ARGS), end)
#endif

// The next run, (0, 0) after the last.
inline int2 take_run(key_runs* runs) {
    const int2 run = runs->next;
    runs->next = runs->more > 0 ? *runs->rest : (int2)(0);
    --runs->more;
    ++runs->rest;
    return run;
}

#define RUN_FIRST(run) ((run).x & ~1)

// Of keys kv_first to before kv_end, in a run: TILE_*; q as for tile_class.
inline int class_in_run(const int2 run, const int batch, const int head, const int2 q, const int kv_first,
                        const int kv_end MOD_PARAMS) {
#if KEY_RUNS
    return run.x & 1 ? TILE_MIXED : TILE_VISIBLE;
#else
    return tile_class(batch, head, 1, q, kv_first, kv_end MOD_ARGS);
#endif
}

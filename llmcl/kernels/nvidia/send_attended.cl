// The end of attention in nvidia/persistent_layers.cl: merges the states of a head's KV splits into `attended`, with flags.
//
// Each of the head's groups leaves the state of its split for the other groups, with a whole word as flag, and merges a slice of
// the head's values. With a gate, a value is scaled by the sigmoid of a row after q, k and v.
// Build: constants of nvidia/attend.cl, N_SPLITS, HAS_SINKS, HAS(ATTENTION_GATE). Local memory: attend_space.
#define HEAD_VALUES (GROUP_SIZE * HEAD_DIM)
#define PART_VALUES (HEAD_VALUES + 2 * GROUP_SIZE)  // accumulators, m and l per query

#if HAS(ATTENTION_GATE)
#define GATES_PARAM , __global const float* gates, const uint gates_flag
#define GATES_ARG , qkv + QKV_SIZE, now.rows_flag
inline float sigmoid_of(const float x) { return 1.0f / (1.0f + exp(-x)); }
#define GATED(i) *sigmoid_of(receive1(gates + (i), gates_flag))
#else
#define GATES_PARAM
#define GATES_ARG
#define GATED(i)
#endif

// Sends the merged values of a head's groups.
inline void send_attended(const kv_split* s, __global ulong* parts, __global float* attended, const uint epoch,
                          const attend_space* space SINKS_PARAM GATES_PARAM) {
    const int lid = this_item(), n_splits = s->n_splits, slice = (HEAD_VALUES + n_splits - 1) / n_splits;
    attended += s->head * HEAD_VALUES;
#if HAS(ATTENTION_GATE)
    gates += s->head * HEAD_VALUES;
#endif
    parts += s->head * N_SPLITS * PART_VALUES;
    for (int i = lid; i < HEAD_VALUES; i += LOCAL_SIZE) {
        const softmax_state all = warps_state(s, i, space);
        if (n_splits == 1) {
            send(attended + i, all.acc * OUTPUT_NORM(all.m, all.l, s->head * GROUP_SIZE + i / HEAD_DIM) GATED(i), epoch & 1);
            continue;
        }
        __global ulong* part = parts + s->split * PART_VALUES;
        send_pair(part + i, all.acc, epoch);
        if (i % HEAD_DIM == 0) {
            send_pair(part + HEAD_VALUES + i / HEAD_DIM * 2, all.m, epoch);
            send_pair(part + HEAD_VALUES + i / HEAD_DIM * 2 + 1, all.l, epoch);
        }
    }
    warp_sync();  // no lane waits for values that its own warp has yet to send
    const int first = s->split * slice, count = min(slice, HEAD_VALUES - first);
    barrier(CLK_LOCAL_MEM_FENCE);  // the warps' states have been read
    if (n_splits == 1 || count <= 0) return;
    __local float* ml = space->warps;                     // [n_splits][GROUP_SIZE][2]
    __local float* acc = ml + (N_SPLITS + HAS_SINKS) * 2 * GROUP_SIZE;  // [n_splits][count]
    const int n_ml = n_splits * 2 * GROUP_SIZE, n_acc = n_splits * count;
    for (int i = lid; i / WARP * WARP < max(n_ml, n_acc); i += LOCAL_SIZE) {
        const int j = min(i, n_ml - 1), k = min(i, n_acc - 1);
        const float2 pair = receive_pairs(parts + j / (2 * GROUP_SIZE) * PART_VALUES + HEAD_VALUES + j % (2 * GROUP_SIZE),
                                          parts + k / count * PART_VALUES + first + k % count, epoch);
        if (i < n_ml) ml[i] = pair.x;
        if (i < n_acc) acc[i] = pair.y;
    }
#if HAS_SINKS
    for (int i = lid; i < GROUP_SIZE * 2; i += LOCAL_SIZE)  // with sinks, an extra state without an accumulator
        ml[n_ml + i] = i % 2 ? 1.0f : sinks[s->head * GROUP_SIZE + i / 2];
#endif
    barrier(CLK_LOCAL_MEM_FENCE);
    weigh_splits(ml, n_splits + HAS_SINKS);
    barrier(CLK_LOCAL_MEM_FENCE);
#if HAS(ATTENTION_GATE)
    for (int j = lid; j / WARP * WARP < count; j += LOCAL_SIZE) {  // a warp's gates arrive together
        const int i = min(j, count - 1);
#else
    for (int i = lid; i < count; i += LOCAL_SIZE) {
#endif
        __local const float* weights = ml + (first + i) / HEAD_DIM * 2;
        float sum = 0.0f;
#pragma unroll 4
        for (int k = 0; k < n_splits; ++k) sum += weights[k * 2 * GROUP_SIZE] * acc[k * count + i];
        send(attended + first + i, sum GATED(first + i), epoch & 1);
    }
    barrier(CLK_LOCAL_MEM_FENCE);  // the warps' memory is free
}

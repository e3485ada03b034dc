// A persistent kernel for NVIDIA GPUs: all layers of a decode step in one launch, between `embed` and the output head.
//
//   for each layer:  qkv = W_qkv norm(x)  |  attended  |  mid = x + W_o attended  |  ffn = gate(W_gate norm(mid)) W_up norm(mid)  |
//                    x = mid + W_down ffn
//
// With experts instead of the MLP: logits = W_router norm(mid), from which each group chooses the token's experts by itself
// (nvidia/chosen_experts.cl). The experts' gates and ups form ffn, slot after slot, and W_down takes all slots at once.
//
// With norms after attention and MLP: mid = x + norm(W_o attended), x = mid + norm(W_down ffn).
//
// Some layers may be recurrent: mixer_in = W_mixer norm(x), and the mixer computes `attended` from it (nvidia/recurrent_mixers.cl).
// If attention has a gate, W_gate norm(x) follows q, k and v, and its sigmoids scale `attended`.
//
// Each phase does the work of nvidia/linear_decode.cl or nvidia/attention_decode.cl, with the same functions and, for the same
// number of warps per group, the same bits. The replaced launches are this kernel's twin.
//
// Groups only wait for the values that they need (nvidia/flag_in_data.cl). Meanwhile, a group requests its first weights for the next
// product. A compute unit's loads are answered in order, so any earlier read from global memory also delays a phase: the layer
// addresses are therefore in local memory. A vector may be overwritten in the next layer, because a group sends its rows of a product
// only after it has received all of the product's input, and a group without rows reads no input. A group with one whole vector
// therefore knows that all readers of the previous vector are done. The next layer's x needs all of ffn, ffn all of mid, mid all of
// attended, a head's attended the states of all the head's groups, a state the head's q, k and v, and qkv all of x. Attention layers
// and recurrent layers write different rows, so the flag of such rows is the parity of the number of layers of the same kind so far.
//
// A row of x has one owner, a group that adds to it and sends it. With SPLIT_K or norms after blocks, each group instead has its
// own x, to which it adds all received values (nvidia/residual_stream.cl); mid and next_x are then the addends. A group with rows
// of qkv or ffn receives both, and neither is overwritten before those rows are sent; a group with neither receives none.
//
// layers   ulong [N_LAYERS][LAYER_WORDS]: per layer, the addresses of weights, keys, values and vectors, and a number. AT_NAME
//          is the index of a word, or negative if no layer has it, at no cost.
//            AT_ATTENTION_NORM, AT_MLP_NORM              float [HIDDEN], norms before attention and before the MLP
//            AT_QKV, AT_OUTPUT, AT_GATE_UP, AT_DOWN      weights, including all experts
//            AT_QKV_REST, AT_TYPES                       with OTHER_WEIGHT beside WEIGHT: see nvidia/layer_types.cl
//            AT_ROUTER, AT_ROUTER_BIAS                   router, and its bias, float [N_EXPERTS]
//            AT_K, AT_V                                  keys and values
//            AT_ATTENTION_POST_NORM, AT_MLP_POST_NORM    float [HIDDEN], norms after attention and MLP: both or none (residual_stream.cl)
//            AT_BIAS, AT_OUTPUT_BIAS, AT_GATE_UP_BIAS, AT_DOWN_BIAS    float, a bias per row of a product; for gate and up [2][FFN]
//            AT_HEAD_NORMS, AT_Q_NORM, AT_K_NORM         see qk_norms in attend.cl
//            AT_SINKS                                    with HAS_SINKS: see online_softmax.cl
//            AT_ROPE                                     like `rope`, if layers differ
//            AT_RULES                                    index of the mods, if layers differ; below N_RULES
//            AT_ATTENTION_GATE                           weight; in a recurrent layer, QKV has the rows of W_mixer
//            AT_CONV, AT_SCALARS, AT_GATED_NORM, AT_CONV_STATES, AT_MATRIX_STATES    in recurrent layers, float
//            AT_MIXER                                    2 n + 1 for the n-th recurrent layer, 2 n for the n-th attention layer; n >= 1
// x        float [HIDDEN], in and out; rope, state: as in the separate kernels
// qkv, attended, mid, ffn, next_x   float, sizes as qkv, attended, SPLIT_K HIDDEN, FFN, SPLIT_K HIDDEN: flagged, private to this
//          kernel
// logits   float [N_EXPERTS], flagged
// parts    ulong [N_KV_HEADS][N_SPLITS][PART_VALUES], the split states: flagged with a whole word
// counters uint [4]: groups that have left (0 before and after), layers run before this launch, claimed units of ffn,
//          recurrent layers run before this launch
// mixer_in float [MIXER_ROWS], flagged; only with recurrent layers
//
// Index space: N_GROUPS groups with 32 WARPS work-items. All groups must run at the same time: one per compute unit.
// Build: constants of nvidia/product.cl (nvidia/product_quantized.cl for quantised weights) and nvidia/attend.cl, and HIDDEN, FFN,
// N_LAYERS, N_GROUPS, N_RULES, LAYER_WORDS, AT_*, NORM_EPS (for all norms except norms before a block), WARPS (16), and SPLIT_K, a
// divisor of N_GROUPS: groups that share the columns of W_o and W_down, 1 with quantised weights; N_EXPERTS, 0 for an MLP. With
// experts also TOP_K, RENORMALIZE, and ROUTER_IS_FLOAT for a float32 router (otherwise WEIGHT); FFN is then TOP_K times an expert's
// size. With recurrent layers also N_RECURRENT (their number), MIXER_ROWS, DELTA_NET or SHORT_CONV, and the constants of
// nvidia/recurrent_mixers.cl. Local memory: group_memory.
#if !defined(HIDDEN) || !defined(FFN) || !defined(N_LAYERS) || !defined(N_GROUPS) || !defined(N_RULES) || \
    !defined(LAYER_WORDS) || !defined(SPLIT_K) || !defined(N_EXPERTS)
#error "nvidia/persistent_layers.cl needs the build constants named in its head"
#endif
#include "common/tiles.cl"
#include "nvidia/ptx.cl"
#include "nvidia/partition.cl"
#define HAS(name) (AT_##name >= 0)
#define Q_SIZE (N_Q_HEADS * HEAD_DIM)
#define EXPERT_COLUMNS MAX(FFN / SPLIT_K, HIDDEN)
#ifdef EXPERT_WEIGHT
#define MAX_COLUMNS MAX(Q_SIZE / SPLIT_K, HIDDEN)
#else
#define MAX_COLUMNS MAX(Q_SIZE / SPLIT_K, EXPERT_COLUMNS)
#endif
#include "nvidia/layer_products.cl"
enum { WEIGHT_BYTES = 2 };  // for split columns
#define ATTEND_WARPS (HEAD_DIM > 128 ? WARPS / 2 : WARPS)  // tiles of wide keys take much local memory
#include "nvidia/attend.cl"

#if N_EXPERTS
#include "nvidia/chosen_experts.cl"
#define EXPERT_SIZE (FFN / TOP_K)
#endif
#if defined(DELTA_NET) || defined(SHORT_CONV)
#define RECURRENT 1
#define MIXER_UNITS (MIXER_ROWS / 16)
#define MIXER_PARAM , __global float* mixer_in
#else
#define RECURRENT 0
#define MIXER_UNITS 0
#define MIXER_PARAM
#endif
#if RECURRENT || HAS(ATTENTION_GATE)
#include "nvidia/recurrent_mixers.cl"
#endif
#define ROUTER_UNITS ((N_EXPERTS + 15) / 16)
#define MLP_UNITS MAX(FFN / 16, ROUTER_UNITS)  // for products that read mid
#define QKV_SIZE (Q_SIZE + 2 * N_KV_HEADS * HEAD_DIM)
#define FIRST_ROWS (QKV_SIZE + (HAS(ATTENTION_GATE) ? Q_SIZE : 0))  // including the gate's rows at the end
#define STREAM_UNITS MAX(MAX(FIRST_ROWS / 16, MIXER_UNITS), MLP_UNITS)  // for products that read x or mid
#define OWN_UNITS ((HIDDEN / 16 + N_GROUPS - 1) / N_GROUPS)
#define CLAIMS (FFN / 16 > 2 * N_GROUPS && !QUANTIZED)
#define VECTOR_OF(layer_words, name) (HAS(name) ? (__global const float*)(layer_words)[HAS(name) ? AT_##name : 0] : 0)
#define VECTOR(name) VECTOR_OF(now.at, name)
#define POST_NORMS HAS(ATTENTION_POST_NORM)
#define STREAM (POST_NORMS || SPLIT_K > 1)
#if STREAM
#define RESIDUAL 0
#else
#define RESIDUAL memory.residual
#endif
#define HAS_QK_NORMS (HAS(HEAD_NORMS) || HAS(Q_NORM))
#if N_RULES == 1
#define MOD_BUFFERS MOD_PARAMS
#endif
// Local floats for the warps' columns, and for attention.
#define OWN_FLOATS ((MAX(MAX(PRODUCT_FLOATS, EXPERT_FLOATS), ATTEND_WARPS == WARPS ? WARP_FLOATS : 0) + 3) / 4 * 4)
#define ATTEND_FLOATS (ATTEND_WARPS == WARPS ? OWN_FLOATS : WARP_FLOATS)
#if QKV_SIZE % 16 || HIDDEN % 16 || FFN % 16
#error "nvidia/persistent_layers.cl: sizes are multiples of 16"
#endif

#include "nvidia/send_attended.cl"

ALWAYS_INLINE matrix partition_of(const ulong weight, const int columns, const int units, const bool gated) {
    const matrix m = {(__global const void*)weight, columns, units, (int)get_group_id(0), N_GROUPS, gated, 0, 0, columns};
    return m;
}

// The products with x at the beginning of a layer. words: the layer's table entries.
#if RECURRENT
#define IS_RECURRENT(words) ((words)[AT_MIXER] & 1)
#else
#define IS_RECURRENT(words) 0
#endif
#if HAS(ATTENTION_GATE)
#define GATE_WEIGHT(words) (words)[AT_ATTENTION_GATE]
#else
#define GATE_WEIGHT(words) 0
#endif
#if FLOAT_COLUMNS
#define FIRST_TILE_BYTES ((ulong)HIDDEN * 16 * WEIGHT_BYTES)
#else
#define FIRST_TILE_BYTES ((ulong)TILE_BYTES(HIDDEN))
#endif
#include "nvidia/layer_types.cl"
#define FIRST_OF(words) first_product((words)[AT_QKV], GATE_WEIGHT(words), IS_RECURRENT(words) TYPES_ARG(words))
ALWAYS_INLINE matrix first_product(const ulong weight, const ulong gate, const bool recurrent TYPES_PARAM) {
    matrix m = partition_of(weight, HIDDEN, recurrent ? MIXER_UNITS : FIRST_ROWS / 16, false);
#if HAS(ATTENTION_GATE)
    m.beyond = (__global const void*)(gate - QKV_SIZE / 16 * FIRST_TILE_BYTES);
    m.beyond_unit = recurrent ? MIXER_UNITS : QKV_SIZE / 16;
#endif
    TAKE_TYPES(m)
    return m;
}

// Tells whether the group has units of the product.
ALWAYS_INLINE bool has_units(const matrix* m) { return m->first_unit < m->n_units; }

// A product whose columns are shared by SPLIT_K neighbouring groups: a group has the same columns in all units.
#define K_PART ((int)get_group_id(0) % SPLIT_K)
ALWAYS_INLINE matrix split_k_of(const ulong weight, const int columns, const int units) {
    const ulong at = SPLIT_K == 1 ? weight : weight + 16 * WEIGHT_BYTES * (columns / SPLIT_K) * K_PART;
    const matrix m = {(__global const void*)at, columns / SPLIT_K, units, (int)get_group_id(0) / SPLIT_K, N_GROUPS / SPLIT_K, false,
                      0, 0, columns};
    return m;
}

// A group's local memory.
typedef struct {
    float own_of[MAX(WARPS * OWN_FLOATS, ATTEND_WARPS * ATTEND_FLOATS)];
    float sums[(PRODUCT_SUM_FLOATS + 3) / 4 * 4];
#ifdef EXPERT_WEIGHT
    float expert_sums[(EXPERT_SUM_FLOATS + 3) / 4 * 4];
#endif
    float queries[QUERY_FLOATS];
#if STREAM
    float4 stream_x[STREAM_X_FOURS * STREAM_ITEMS];
    float4 stream_factors[POST_NORMS ? STREAM_X_FOURS * STREAM_ITEMS : 1];
    float squares[2][WARPS];
#else
    float residual[OWN_UNITS * 16];
#endif
#if N_EXPERTS
    chosen_experts experts;
#endif
    float row_squares[HAS(Q_NORM) ? 2 * WARPS : 1];
#if RECURRENT
    mixer_memory mixer;
    uint recurrent_before;  // recurrent layers run before this launch
#endif
    kv_split kept[N_RULES];
    ulong addresses[N_LAYERS * LAYER_WORDS];  // `layers`
    uint before;  // layers run before this launch
    int layer[LOCAL_SIZE];  // per work-item
    float new_rows[NEW_FLOATS];
} __attribute__((aligned(16))) group_memory;

// The current layer. Computed again in each phase: values kept in registers during attention would be spilled, and reloaded behind
// the weights requested meanwhile. For the same reason a group's local memory is a single structure, with a single address.
typedef struct {
    __local const ulong* at;
    uint number, flag;
    bool is_first, is_last;
    bool recurrent;
    uint rows_flag;  // for the rows computed from x: attention layers and recurrent layers have separate rows
} place;

ALWAYS_INLINE place place_now(__local const group_memory* memory) {
    const int layer = *(volatile __local const int*)(memory->layer + this_item());
    const uint number = *(volatile __local const uint*)&memory->before + layer + 1;
    __local const ulong* words = memory->addresses + layer * LAYER_WORDS;
#if RECURRENT
    const uint mixer = *(volatile __local const uint*)(words + AT_MIXER);
    const uint recurrent_before = *(volatile __local const uint*)&memory->recurrent_before;
    const bool recurrent = mixer & 1;
    const uint rows_flag = (mixer / 2 + (recurrent ? recurrent_before : number - 1 - layer - recurrent_before)) & 1;
#else
    const bool recurrent = false;
    const uint rows_flag = number & 1;
#endif
    const place now = {words, number, number & 1, layer == 0, layer == N_LAYERS - 1, recurrent, rows_flag};
    return now;
}

// Gate and up of the current layer. experts: expert per slot; 0 for an MLP.
ALWAYS_INLINE matrix ffn_of(const place* now, __global uint* counters, __local const int* experts) {
    matrix m = TYPED_OF(now, GATE_UP, partition_of(now->at[AT_GATE_UP], HIDDEN, FFN / 16, true));
#if CLAIMS
    m.claims = counters + 2;
    m.claimed = (now->number - 1) * (FFN / 16 - N_GROUPS);  // units claimed per layer: all but two per group, and a miss per group
#endif
#if N_EXPERTS
    m.experts = experts;
    m.expert_units = EXPERT_SIZE / 16;
#endif
    return m;
}

__kernel __attribute__((reqd_work_group_size(LOCAL_SIZE, 1, 1)))
void persistent_layers(__global const ulong* layers, __global float* x, __global float* qkv, __global float* attended,
                       __global float* mid, __global float* ffn, __global float* next_x, __global float* logits,
                       __global const float* rope, __global const int* state, __global ulong* parts,
                       __global uint* counters MIXER_PARAM MOD_BUFFERS) {
    __local group_memory memory;
    __local float* sums = memory.sums;
    const int lid = get_local_id(0), warp = lid / WARP, group = get_group_id(0);
    __local float* columns = memory.own_of + warp * OWN_FLOATS;
    const attend_space space = {memory.queries, memory.new_rows, memory.own_of, ATTEND_FLOATS, memory.row_squares};
    if (lid == 0) memory.before = counters[1];
    memory.layer[lid] = 0;
    const bool attends = group < N_KV_HEADS * N_SPLITS;
    for (int rules = 0; rules < N_RULES; ++rules)
        if (lid == rules) memory.kept[rules] = split_of_keys(min(group / N_SPLITS, N_KV_HEADS - 1), group % N_SPLITS, state MOD_ARGS);
    int parity = 0;
    weight_fragment fragment;
#ifdef EXPERT_WEIGHT
    expert_fragment of_experts;
#define EXPERT_FRAGMENT (&of_experts)
#define EXPERT_SUMS memory.expert_sums
#else
#define EXPERT_FRAGMENT (&fragment)
#define EXPERT_SUMS sums
#endif
#if RECURRENT
    if (lid == 0) {
        memory.recurrent_before = counters[3];
        memory.mixer.slot = state[STATE_POSITION] > 0 ? state[STATE_RECURRENT] : -1 - state[STATE_RECURRENT];
    }
#endif
    matrix to_qkv = FIRST_OF(layers);
    load_early(&fragment, &to_qkv);
    for (int i = lid; i < N_LAYERS * LAYER_WORDS; i += LOCAL_SIZE) memory.addresses[i] = layers[i];
#if STREAM
    // No group waits for data received by a group without such rows.
    const bool has_stream = group < STREAM_UNITS;
#else
    for (int i = lid; i < OWN_UNITS * 16; i += LOCAL_SIZE) {
        const int row = (group + i / 16 * N_GROUPS) * 16 + i % 16;
        if (row < HIDDEN) memory.residual[i] = x[row];
    }
#endif
    barrier(CLK_LOCAL_MEM_FENCE);
    while (true) {
        place now = place_now(&memory);
        const matrix none = partition_of(0, 16, 0, false);
#if STREAM
        const residual_stream down_stream = {memory.stream_x, memory.stream_factors, memory.squares[0], now.is_first, POST_NORMS, 0};
        if (has_stream)
            receive(&fragment, &to_qkv, now.is_first ? x : next_x, now.flag ^ 1, !now.is_first, VECTOR(ATTENTION_NORM),
                    HAS(ATTENTION_NORM), &down_stream, columns, sums);
#else
        if (group < FIRST_UNITS)
            receive(&fragment, &to_qkv, now.is_first ? x : next_x, now.flag ^ 1, !now.is_first, VECTOR(ATTENTION_NORM),
                    HAS(ATTENTION_NORM), 0, columns, sums);
#endif
#if RECURRENT
        const target qkv_target = {now.recurrent ? mixer_in : qkv, 0, 0, now.rows_flag, true, false, VECTOR(BIAS)};
        const int first_rows = now.recurrent ? MIXER_ROWS : FIRST_ROWS;
#else
        const target qkv_target = {qkv, 0, 0, now.rows_flag, true, false, VECTOR(BIAS)};
        const int first_rows = FIRST_ROWS;
#endif
#ifdef AT_QKV_REST
        const matrix rest = rest_of_first(now.at[AT_QKV_REST], TYPES(now.at));
        product(&to_qkv, &rest, &qkv_target, first_rows, HAS(ATTENTION_NORM), columns, sums, &parity, &fragment);
        product(&rest, &none, &qkv_target, first_rows, HAS(ATTENTION_NORM), columns, sums, &parity, &fragment);
#else
        product(&to_qkv, &none, &qkv_target, first_rows, HAS(ATTENTION_NORM), columns, sums, &parity, &fragment);
#endif
        // A warp attends in the memory of other warps' columns; products end with a barrier, if the group has any.
        if (ATTEND_WARPS < WARPS && group >= FIRST_UNITS) barrier(CLK_LOCAL_MEM_FENCE);

        now = place_now(&memory);
#if N_RULES > 1
        const int rules = (int)now.at[AT_RULES];
#else
        const int rules = 0;
#endif
        const kv_split range = memory.kept[rules];
#if RECURRENT
        if (now.recurrent) {
            __global const float* conv = VECTOR(CONV);
            __global float* conv_states = (__global float*)now.at[AT_CONV_STATES];
#ifdef DELTA_NET
            if (group < N_V)
                mix_delta_head(group, mixer_in, now.rows_flag, conv, VECTOR(SCALARS), VECTOR(GATED_NORM), conv_states,
                               (__global float*)now.at[AT_MATRIX_STATES], &memory.mixer, memory.own_of, attended, now.flag);
#else
            mix_short_conv(group, mixer_in, now.rows_flag, conv, conv_states, memory.mixer.slot, attended, now.flag);
#endif
        } else
#endif
        if (attends && range.split < range.n_splits) {
            // Like to_out, which is made after attention because attention needs the registers.
            const matrix ahead = TYPED(OUTPUT, split_k_of(now.at[AT_OUTPUT], Q_SIZE, HIDDEN / 16));
            if (range.n_splits == 1) fetch_first(&ahead);  // over a long context the prefetch makes it slower
            __global CAT(KV, _t)* k = (__global CAT(KV, _t)*)now.at[AT_K];
            __global CAT(KV, _t)* v = (__global CAT(KV, _t)*)now.at[AT_V];
            const qk_norms norms = {VECTOR(HEAD_NORMS), VECTOR(Q_NORM), VECTOR(K_NORM)};
            attend(&range, qkv, now.rows_flag, true, HAS(ROPE) ? VECTOR(ROPE) : rope, state, k, v, HAS_QK_NORMS ? &norms : 0,
                   &space MOD_ARGS);
#if HAS_SINKS
            __global const float* sinks = VECTOR(SINKS);
#endif
            send_attended(&range, parts, attended, now.number, &space SINKS_ARG GATES_ARG);
        }
        now = place_now(&memory);
        const matrix to_out = TYPED(OUTPUT, split_k_of(now.at[AT_OUTPUT], Q_SIZE, HIDDEN / 16));
        load_early(&fragment, &to_out);

        if (to_out.first_unit < to_out.n_units)
            receive(&fragment, &to_out, attended + K_PART * to_out.columns, now.flag, true, 0, false, 0, columns, sums);
#if N_EXPERTS
#ifdef ROUTER_IS_FLOAT
        matrix to_ffn = partition_of(0, HIDDEN, 0, false);  // for the columns to receive
#else
        matrix to_ffn = partition_of(now.at[AT_ROUTER], HIDDEN, ROUTER_UNITS, false);
#endif
#else
        matrix to_ffn = ffn_of(&now, counters, 0);
#endif
        const target mid_target = {mid + K_PART * HIDDEN, RESIDUAL, 0, now.flag, true, !STREAM, K_PART == 0 ? VECTOR(OUTPUT_BIAS) : 0};
#if STREAM
        const residual_stream out_stream = {memory.stream_x, memory.stream_factors, memory.squares[1], false, POST_NORMS, 0};
        if (POST_NORMS && has_stream) ask_factors(&out_stream, VECTOR(ATTENTION_POST_NORM));
#endif
        product(&to_out, &to_ffn, &mid_target, HIDDEN, false, columns, sums, &parity, &fragment);

        now = place_now(&memory);
#if STREAM
        if (has_stream)
            receive(&fragment, &to_ffn, mid, now.flag, true, VECTOR(MLP_NORM), HAS(MLP_NORM), &out_stream, columns, sums);
#else
        if (group < MLP_UNITS)
            receive(&fragment, &to_ffn, mid, now.flag, true, VECTOR(MLP_NORM), HAS(MLP_NORM), 0, columns, sums);
#endif
        matrix to_x = TYPED(DOWN, split_k_of(now.at[AT_DOWN], FFN, HIDDEN / 16));
#if N_EXPERTS
        const target router_target = {logits, 0, 0, now.flag, true, false, VECTOR(ROUTER_BIAS)};
#ifdef ROUTER_IS_FLOAT
        for (int unit = group; unit < ROUTER_UNITS; unit += N_GROUPS)
            router_product((__global const float*)now.at[AT_ROUTER], unit, N_EXPERTS, columns, mid, VECTOR(MLP_NORM), HAS(MLP_NORM),
                           sums, &parity, &router_target);
#else
        product(&to_ffn, &none, &router_target, N_EXPERTS, HAS(MLP_NORM), columns, sums, &parity, &fragment);
#endif
        now = place_now(&memory);
        to_ffn = ffn_of(&now, counters, memory.experts.ids);
        to_x.weight = (__global const void*)now.at[AT_DOWN];
        to_x.experts = memory.experts.ids;
        to_x.shares = memory.experts.shares;
        to_x.expert_units = HIDDEN / 16;
        to_x.row_columns = EXPERT_SIZE;
        to_x.first_column = K_PART * to_x.columns;
        if (has_units(&to_ffn) || has_units(&to_x)) {
            if (has_units(&to_ffn)) take_columns(columns, sums, EXPERT_SUMS);
            choose_experts(&memory.experts, logits, now.flag);
            if (has_units(&to_ffn)) expert_load(EXPERT_FRAGMENT, &to_ffn);
            barrier(CLK_LOCAL_MEM_FENCE);  // the shares have arrived
        }
#endif
        const target ffn_target = {ffn, 0, 0, now.flag, true, false, VECTOR(GATE_UP_BIAS)};
        expert_product(&to_ffn, &to_x, &ffn_target, FFN, HAS(MLP_NORM), columns, EXPERT_SUMS, &parity, EXPERT_FRAGMENT);

        now = place_now(&memory);
#ifdef DELTA_NET
        // The group's rows of ffn are sent, so mid was complete, and before it the mixed rows of all groups.
        if (now.recurrent && group < N_V) keep_inputs(group, (__global float*)now.at[AT_CONV_STATES], &memory.mixer);
#endif
        if (to_x.first_unit < to_x.n_units)
            expert_receive(EXPERT_FRAGMENT, &to_x, ffn + K_PART * to_x.columns, now.flag, true, 0, false, 0, columns, EXPERT_SUMS);
        const target x_target = {next_x + K_PART * HIDDEN, RESIDUAL, now.is_last && !STREAM ? x : 0, now.flag, true, !STREAM,
                                 N_EXPERTS || K_PART == 0 ? VECTOR(DOWN_BIAS) : 0};
#if POST_NORMS
        if (has_stream) ask_factors(&out_stream, VECTOR(MLP_POST_NORM));
#endif
        to_qkv = FIRST_OF(now.is_last ? now.at : now.at + LAYER_WORDS);
        if (now.is_last) to_qkv.n_units = 0;
#ifdef EXPERT_WEIGHT
        expert_product(&to_x, &none, &x_target, HIDDEN, false, columns, EXPERT_SUMS, &parity, EXPERT_FRAGMENT);
#else
        product(&to_x, &to_qkv, &x_target, HIDDEN, false, columns, sums, &parity, &fragment);
#endif
        if (place_now(&memory).is_last) break;
        ++memory.layer[this_item()];
    }
#if STREAM
    if (group == 0) {  // the complete x of the last layer
        const residual_stream last = {memory.stream_x, memory.stream_factors, memory.squares[0], false, POST_NORMS, x};
        receive(&fragment, &to_qkv, next_x, (memory.before + N_LAYERS) & 1, true, 0, false, &last, columns, sums);
    }
#endif
    // The last group to leave counts the layers; all groups have read the count.
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lid == 0 && atomic_inc(counters) == N_GROUPS - 1) {
        counters[0] = 0;
        counters[1] = memory.before + N_LAYERS;
#if RECURRENT
        counters[3] = memory.recurrent_before + N_RECURRENT;
#endif
    }
}

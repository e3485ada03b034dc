// Marks the weights of a layer in nvidia/persistent_layers.cl that are stored as OTHER_WEIGHT, if a launch has two types.
//
// AT_TYPES      bit OF_NAME: the product's weight is OTHER_WEIGHT; from bit FIRST_UNIT_AT on, the number of qkv units at AT_QKV
// AT_QKV_REST   the address of the remaining qkv units, with another type, in layers with two qkv types
//
// The remaining units keep their numbers, and so their work-groups: a group has as many qkv units as with a single buffer. Such a
// launch has no recurrent layers and no attention gate, because their rows would follow the qkv rows, too.
//
// Build: OTHER_PRODUCTS, bits as in AT_TYPES: the products with OTHER_WEIGHT in some layer.
#ifdef OTHER_WEIGHT
#define OF_QKV 0
#define OF_QKV_REST 1
#define OF_OUTPUT 2
#define OF_GATE_UP 3
#define OF_DOWN 4
#define FIRST_UNIT_AT 8
#define TYPES(words) ((uint)(words)[AT_TYPES])
#define TYPES_PARAM , const uint types
#define TYPES_ARG(words) , TYPES(words)
#define IS_OTHER(types, name) ((OTHER_PRODUCTS >> OF_##name & 1) && ((types) >> OF_##name & 1))
#define TYPED_OF(place, name, m) typed(m, IS_OTHER(TYPES((place)->at), name))
#define TYPED(name, m) TYPED_OF(&now, name, m)
#ifdef AT_QKV_REST
#define TAKE_TYPES(m)                     \
    (m).n_units = types >> FIRST_UNIT_AT; \
    (m).other = IS_OTHER(types, QKV);
#else
#define TAKE_TYPES(m) (m).other = IS_OTHER(types, QKV);
#endif

inline matrix typed(matrix m, const bool other) {
    m.other = other;
    return m;
}
#else
#define TYPES_PARAM
#define TYPES_ARG(words)
#define TYPED_OF(place, name, m) m
#define TYPED(name, m) m
#define TAKE_TYPES(m)
#endif

#ifdef AT_QKV_REST
#define FIRST_UNITS (FIRST_ROWS / 16)
inline matrix rest_of_first(const ulong weight, const uint types) {
    const int first = types >> FIRST_UNIT_AT;
    const bool other = IS_OTHER(types, QKV_REST);
    matrix m = partition_of(weight - first * (ulong)(other ? OTHER_TILE_BYTES : TILE_BYTES(HIDDEN)), HIDDEN,
                            FIRST_UNITS, false);
    m.first_unit += (max(first - m.first_unit, 0) + N_GROUPS - 1) / N_GROUPS * N_GROUPS;
    m.other = other;
    return m;
}
#else
#define FIRST_UNITS to_qkv.n_units
#endif

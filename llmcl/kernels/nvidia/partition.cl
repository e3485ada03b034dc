// A work-group's share of a product, W x, and the destination of its rows: common to nvidia/product.cl and nvidia/product_quantized.cl.
// A unit is a 16-row tile, or with `gated` two tiles (gate and up).
#include "nvidia/flag_in_data.cl"
#include "nvidia/residual_stream.cl"

// A group's partition of a matrix: every unit_stride-th unit from first_unit on. Or, with `claims` (a count of units that groups
// have taken), the first two units and then any units left: some compute units are slower by a seventh. `claimed`: the count before.
typedef struct {
    __global const void* weight;
    int columns, n_units, first_unit, unit_stride;
    bool gated;
    __global uint* claims;
    uint claimed;
    int row_columns;  // in the whole matrix; `columns` may be a part
    __local const int* experts;   // expert per slot of a token, see below; 0: a single matrix
    __local const float* shares;  // per slot, the factor of its columns; 0: all factors are 1
    int expert_units, first_column;
    __global const void* beyond;  // address for units from beyond_unit on, as if the first unit were there, too; see WEIGHT_OF
    int beyond_unit;              // 0: all units are in one place
#ifdef OTHER_WEIGHT
    bool other;  // stored as OTHER_WEIGHT; see nvidia/second_type.cl
#endif
} matrix;

// The start of the matrix that holds a unit.
#define WEIGHT_OF(m, unit) ((m)->beyond_unit && (unit) >= (m)->beyond_unit ? (m)->beyond : (m)->weight)

// The matrices of several experts, stacked by rows, form a matrix of the token's experts: gate and up have the units of the first
// slot's expert, then the next slot's; down has the columns of all slots side by side, from first_column on. Slot, and place in the
// expert, of a unit or column:
#define SLOT_OF(m, unit, column) \
    ((m)->gated ? (unit) / (m)->expert_units : ((m)->first_column + (column)) / (m)->row_columns)

// The place of a unit's column (a multiple of 16) in a matrix: tile, and column in the tile.
typedef struct {
    size_t tile;
    int column;
} tile_column;
ALWAYS_INLINE tile_column place_in(const matrix* m, const int unit, const int column) {
    const int tiles = m->gated ? 2 : 1;
    if (!m->experts) {
        const tile_column there = {(size_t)unit * tiles, column};
        return there;
    }
    const int slot = SLOT_OF(m, unit, column), of_expert = m->gated ? unit - slot * m->expert_units : unit;
    const tile_column there = {((size_t)m->experts[slot] * m->expert_units + of_expert) * tiles,
                               m->gated ? column : m->first_column + column - slot * m->row_columns};
    return there;
}

#define TILES(m) ((m)->gated ? 2 : 1)

// The destination of a row's value.
typedef struct {
    __global float* out;
    __local float* residual;  // for the group's units, if values are flagged and added
    __global float* last;     // like `out`, without flags; 0: none
    uint flag;
    bool flagged, add;
    __global const float* bias;  // per row, if values are flagged; for a gated product [2][rows]; 0: none. For all experts
} target;

// The bias of a row; gated: of its gate (half 0) or up (half 1).
ALWAYS_INLINE float bias_of(const target* to, const matrix* m, const int rows, const int row, const int half_unit) {
    if (!m->experts) return as_float(load4_words(to->bias + (m->gated ? half_unit * rows : 0) + row));
    const int of_expert = m->expert_units * 16;
    if (m->gated) {
        const int slot = row / of_expert;
        return to->bias[(m->experts[slot] * 2 + half_unit) * of_expert + row - slot * of_expert];
    }
    float sum = 0.0f;  // for slots that begin in these columns
    const int end = m->first_column + m->columns + m->row_columns - 1;
    for (int slot = (m->first_column + m->row_columns - 1) / m->row_columns; slot < end / m->row_columns; ++slot)
        sum += m->shares[slot] * to->bias[m->experts[slot] * of_expert + row];
    return sum;
}

// bias: the addend if `biased`.
ALWAYS_INLINE void deliver(const target* to, const int row, const int own_row, float value, const bool biased, const float bias) {
    if (to->flagged) {
        if (to->add) value += to->residual[own_row];
        if (biased) value = add_rounded(value, bias);
        if (to->add) to->residual[own_row] = value;
        send(to->out + row, value, to->flag);
        if (to->last) to->last[row] = value;
    } else
        to->out[row] = to->add ? to->out[row] + value : value;
}

// What a work-group has of a product, W x, and where its rows go: common to nvidia/product.cl and nvidia/product_quantized.cl.
// A unit is one 16-row tile, or with `gated` two (gate and up).
#include "nvidia/flag_in_data.cl"
#include "nvidia/residual_stream.cl"

// A group's partition of a matrix: every unit_stride-th unit from first_unit on. Or, with claims, which counts units that groups
// have taken, those two and then whichever are left: some compute units are slower by a seventh. `claimed`: the count before.
typedef struct {
    __global const void* weight;
    int columns, n_units, first_unit, unit_stride;
    bool gated;
    __global uint* claims;
    uint claimed;
    int row_columns;  // of the whole matrix, of which `columns` may be a part
    __local const int* experts;   // of each slot of a token, see below; 0: one matrix
    __local const float* shares;  // of each slot, what its columns count; 0: nothing else than 1
    int expert_units, first_column;
    __global const void* beyond;  // where units from beyond_unit on lie, as if the first unit were there, too; see WEIGHT_OF
    int beyond_unit;              // 0: all are in one place
#ifdef OTHER_WEIGHT
    bool other;  // it is stored in OTHER_WEIGHT; see nvidia/second_type.cl
#endif
} matrix;

// Where the matrix would begin that has a unit.
#define WEIGHT_OF(m, unit) ((m)->beyond_unit && (unit) >= (m)->beyond_unit ? (m)->beyond : (m)->weight)

// The matrices of several experts, one below the other, are a matrix of those that a token goes to: gate and up have the units of
// the first slot's expert, then those of the next; down has the columns of all slots side by side, from first_column on. Slot and
// place in the expert of a unit or column:
#define SLOT_OF(m, unit, column) \
    ((m)->gated ? (unit) / (m)->expert_units : ((m)->first_column + (column)) / (m)->row_columns)

// Where 16 rows of a matrix have a unit's column (a multiple of 16): tile and column in the tile.
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

// Where a row's value goes.
typedef struct {
    __global float* out;
    __local float* residual;  // of the group's units, where values are flagged and added
    __global float* last;     // as `out`, without flags; 0 for none
    uint flag;
    bool flagged, add;
    __global const float* bias;  // of each row, where values are flagged; of a gated product [2][rows]; 0 for none. Of all experts
} target;

// What is added to a row; gated: to that of gate (half 0) or up (half 1).
ALWAYS_INLINE float bias_of(const target* to, const matrix* m, const int rows, const int row, const int half_unit) {
    if (!m->experts) return as_float(load4_words(to->bias + (m->gated ? half_unit * rows : 0) + row));
    const int of_expert = m->expert_units * 16;
    if (m->gated) {
        const int slot = row / of_expert;
        return to->bias[(m->experts[slot] * 2 + half_unit) * of_expert + row - slot * of_expert];
    }
    float sum = 0.0f;  // of the slots that begin in these columns
    const int end = m->first_column + m->columns + m->row_columns - 1;
    for (int slot = (m->first_column + m->row_columns - 1) / m->row_columns; slot < end / m->row_columns; ++slot)
        sum += m->shares[slot] * to->bias[m->experts[slot] * of_expert + row];
    return sum;
}

// bias: what is added where `biased`.
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

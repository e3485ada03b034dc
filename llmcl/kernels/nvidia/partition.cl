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
} matrix;

#define TILES(m) ((m)->gated ? 2 : 1)

// Where a row's value goes.
typedef struct {
    __global float* out;
    __local float* residual;  // of the group's units, where values are flagged and added
    __global float* last;     // as `out`, without flags; 0 for none
    uint flag;
    bool flagged, add;
    __global const float* bias;  // of each row, where values are flagged; of a gated product [2][rows]; 0 for none
} target;

// bias: what is added where `biased`.
inline void deliver(const target* to, const int row, const int own_row, float value, const bool biased, const float bias) {
    if (to->flagged) {
        if (to->add) value += to->residual[own_row];
        if (biased) value = add_rounded(value, bias);
        if (to->add) to->residual[own_row] = value;
        send(to->out + row, value, to->flag);
        if (to->last) to->last[row] = value;
    } else
        to->out[row] = to->add ? to->out[row] + value : value;
}

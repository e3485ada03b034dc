// A row from cpu/norm_activations.cl: k numbers, the sums of 32-column groups, the scale; rows begin at multiples of 64 bytes.
#define SCALE_AT(k) ((k) + (k) / 32)
#define ROW_FLOATS(k) ((SCALE_AT(k) + 16) / 16 * 16)

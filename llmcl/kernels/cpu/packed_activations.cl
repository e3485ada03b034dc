// The layout of a token's activations rounded for a product: blocks of TILE_TOKENS tokens, in the product's reading order.
//
//   8 bits     [ceil(n / TILE_TOKENS)][K/32] { numbers [TILE_TOKENS][32]; scale, start, second, norm [TILE_TOKENS], 4 bytes each }
//   bfloat16   [ceil(n / TILE_TOKENS)][K/16] { numbers [TILE_TOKENS][16] }
//
// For a group of 32 numbers q (cpu/quant_tile.cl): scale s; start: -OFFSET sum q as an int, with HAS_HALF_SCALES over the first
// 16; second: s sum q, with HAS_HALF_SCALES -OFFSET times the sum over the last 16 as an int; norm: multiplies the token's products.
//
// With NORM the rows are normalised as in rms_norm.cl. For bfloat16, before rounding. For 8 bits x norm is rounded, and the product
// applies the row's scale, as in cpu/linear_decode.cl.
//
// Build: TILE_TOKENS; for row_scale and load_row NORM, EPS.
#if !defined(TILE_TOKENS)
#error "cpu/packed_activations.cl needs the build constant TILE_TOKENS"
#endif
#define NUMBERS (8 * TILE_TOKENS)  // ints in a block's numbers
#define ROW8 12                    // ints in a one-token block
#define BLOCK8 (ROW8 * TILE_TOKENS)  // ints in an 8-bit block, with records: 16 numbers are stored at once, so blocks are aligned

#define RECORD_AT(i, which) (NUMBERS + (which) * TILE_TOKENS + (i))  // in a block, for its token i

#ifdef NORM
#include "cpu/norm_row.cl"
#endif

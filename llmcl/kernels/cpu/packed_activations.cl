// Where a token's activations lie that a kernel rounded for a product: in blocks of TILE_TOKENS tokens, one behind the other as the
// product reads them.
//
//   8 bits     [ceil(n / TILE_TOKENS)][K/32] { numbers [TILE_TOKENS][32]; scale, start, second, norm [TILE_TOKENS], 4 bytes each }
//   bfloat16   [ceil(n / TILE_TOKENS)][K/16] { numbers [TILE_TOKENS][16] }
//
// Of a group of 32 numbers q (cpu/quant_tile.cl): scale s; start: -OFFSET sum q as an int, with q6_k of the first 16;
// second: s sum q, with q6_k -OFFSET times the sum of the last 16 as an int; norm: what the token's products are multiplied with.
//
// With NORM the rows are normalised as in rms_norm.cl: before they are rounded to bfloat16; rounded to 8 bits, x norm is, and the
// scale of the row is left to the product, as in cpu/linear_decode.cl.
//
// Build: TILE_TOKENS; for row_scale and load_row NORM, EPS.
#if !defined(TILE_TOKENS)
#error "cpu/packed_activations.cl needs the build constant TILE_TOKENS"
#endif
#define NUMBERS (8 * TILE_TOKENS)  // ints of a block's numbers
#define ROW8 12                    // ints of a block of one token
#define BLOCK8 (ROW8 * TILE_TOKENS)  // ints of a block in 8 bits, with its records: 16 numbers are stored at once, so blocks are aligned

#define RECORD_AT(i, which) (NUMBERS + (which) * TILE_TOKENS + (i))  // in a block, of token i of it

#ifdef NORM
#include "cpu/norm_row.cl"
#endif

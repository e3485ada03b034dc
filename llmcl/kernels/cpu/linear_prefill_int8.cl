// Y = X W^T for a step's tokens on a CPU with 8-bit dot products: quantised weights, activations from quantize_activations.
//
//   y[t][r] as in cpu/quant_tile.cl;   EPILOGUE as in cpu/linear_decode.cl (SWIGLU: tiles alternate gate, up)
//
// weight   tiles of WEIGHT (tiles.cl)      x  the step's activations in 8-bit blocks (cpu/packed_activations.cl)
// out      float [n][out_stride], columns out_row .. out_row + n_rows - 1; with OUT_WEIGHT the same columns as 8-bit activations for
//          a product with out_stride columns and weights of type OUT_WEIGHT, rounded like quantize_activations
//
// Index space: (streams, ceil(n / GROUP_TOKENS)), local size 1; stream g takes units g U / G .. (g + 1) U / G, as in
// cpu/linear_decode.cl, with a unit of TILE_COLS tiles. TILE_TOKENS tokens are computed at once (cpu/packed_product.cl);
// for the last tokens a multiple of TAIL_STEP.
//
// Build: WEIGHT, K, EPILOGUE, DOT > 0, TILE_TOKENS, TILE_COLS (1; 2 with SWIGLU, 4 with
// OUT_WEIGHT, too), GROUP_TOKENS (a multiple of TILE_TOKENS), TAIL_STEP (all, a half or a quarter of TILE_TOKENS); OUT_WEIGHT: only
// with SWIGLU.
#if !defined(WEIGHT) || !defined(K) || !defined(EPILOGUE) || !defined(DOT) || !defined(TILE_TOKENS) || !defined(TILE_COLS) || !defined(GROUP_TOKENS) || \
    !defined(TAIL_STEP) || !defined(STATE_N_TOKENS)
#error "cpu/linear_prefill_int8.cl needs the build constants WEIGHT, K, EPILOGUE, DOT, TILE_TOKENS, TILE_COLS, GROUP_TOKENS, TAIL_STEP and those of the step state"
#endif
#include "cpu/quant_tile.cl"
#include "cpu/packed_activations.cl"
#include "cpu/packed_product.cl"
#ifdef OUT_WEIGHT
#include "cpu/quantize_row.cl"
#endif

#define WEIGHT_ITEM uchar
#define X_ITEM int
#define TOKENS_SIZE ((K / 32) * BLOCK8)
#include "cpu/linear_prefill_units.cl"

// Tile pieces for any storage type: float_piece.cl or quant_piece.cl. Build: WEIGHT, K, NORM.
#include "common/tiles.cl"
#include "portable/widen.cl"
#if QUANTIZED
#include "portable/quant_piece.cl"
#else
#include "portable/float_piece.cl"
#endif

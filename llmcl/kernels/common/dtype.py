"""Storage types for weights and KV cache, with public names and kernel names."""

from __future__ import annotations

from dataclasses import dataclass

from llmcl.checkpoint.formats import FLOAT_FORMATS, FORMATS
from llmcl.errors import UsageError, shown

TILE_ROWS = 16

KERNEL_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def is_16_bit(dtype: str) -> bool:
    return dtype in ("float16", "bfloat16")


@dataclass(frozen=True)
class BlockType:
    """A quantised storage type on the device (kernels/common/tiles.cl)."""

    format: str  # checkpoint format
    block: int  # columns per block
    tile_bytes: int  # bytes of 16 rows by a block


QUANTIZED = {
    format.lower(): BlockType(format, stored.block, stored.tile_bytes)
    for format, stored in FORMATS.items()
    if stored.tile_bytes
}
# Types with values q d + m: a product needs the sum of activations per group (kernels/common/tiles.cl).
WITH_MINIMUM = "q4_1", "q5_1", "q4_k", "q5_k"
# The storage type that holds each checkpoint format unchanged.
NATIVE = FLOAT_FORMATS | {q.format: name for name, q in QUANTIZED.items()}

ACTIVATION_DTYPES = ("auto", "float32")
KV_DTYPES = (*KERNEL_NAMES, "q8_0")


def kernel_name(dtype: str) -> str:
    """Returns `dtype` as written in the build constants WEIGHT and KV."""
    return KERNEL_NAMES.get(dtype, dtype)


def dtype_of_kernel(name: str) -> str:
    """Returns the dtype for a kernel name: the inverse of `kernel_name`."""
    return next((dtype for dtype, kernel_dtype in KERNEL_NAMES.items() if kernel_dtype == name), name)


def tile_bytes(k: int, dtype: str) -> int:
    """Returns the bytes of a tile: 16 rows by k columns."""
    if dtype in QUANTIZED:
        return k // QUANTIZED[dtype].block * QUANTIZED[dtype].tile_bytes
    return TILE_ROWS * k * ITEM_BYTES[dtype]


def kv_row_bytes(head_dim: int, kv_dtype: str) -> int:
    """Returns the bytes per head for a cached key or value. 16 rows lie together (kernels/common/kv_cache.cl)."""
    return tile_bytes(head_dim, kv_dtype) // TILE_ROWS


def is_rounded(kv_dtype: str, weight_dtype: str) -> bool:
    """Tells whether attention may round its operands (see AttentionShape.exact_queries).

    With a quantised cache, queries may round to 8 bits. For "native" (as stored) and bfloat16 weights, operands may
    round to bfloat16, because prefill products round activations, too.
    """
    return kv_dtype in QUANTIZED or weight_dtype not in ("float32", "float16")


def check_kv_dtype(kv_dtype: str, head_dim: int) -> str:
    """Raises UsageError for an unknown cache type, or for a head size that the cache type does not support."""
    if kv_dtype not in KV_DTYPES:
        raise UsageError(f"kv_dtype is {shown(kv_dtype)}; expected auto, {', '.join(KV_DTYPES)}")
    if kv_dtype in QUANTIZED and head_dim % (block := QUANTIZED[kv_dtype].block):
        raise UsageError(
            f"the model has a head_dim of {head_dim}, which a {kv_dtype} KV cache cannot hold: it needs a multiple of "
            f"{block}; use --kv-dtype float16 (kv_dtype)"
        )
    return kv_dtype


def check_dtype(dtype: str, option: str, *others: str) -> str:
    """Returns `dtype` if it is a floating-point type. Otherwise raises UsageError; `others` are expected, too."""
    if not isinstance(dtype, str) or dtype not in KERNEL_NAMES:
        raise UsageError(f"{option} is {shown(dtype)}; expected auto, {', '.join([*KERNEL_NAMES, *others])}")
    return dtype

"""Storage types of weights and KV cache, by their public names and as kernels name them."""

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
    """A quantised weight on the device (kernels/common/tiles.cl): checkpoint format, bytes of 16 rows by a block."""

    format: str
    block: int
    tile_bytes: int


QUANTIZED = {
    format.lower(): BlockType(format, stored.block, stored.tile_bytes)
    for format, stored in FORMATS.items()
    if stored.tile_bytes
}
# Whose value is q d + m: a product needs the sum of the activations of each group (kernels/common/tiles.cl).
WITH_MINIMUM = "q4_1", "q5_1", "q4_k", "q5_k"
# The storage type in which a checkpoint's format is held as it is.
NATIVE = FLOAT_FORMATS | {q.format: name for name, q in QUANTIZED.items()}

ACTIVATION_DTYPES = ("auto", "float32")
KV_DTYPES = (*KERNEL_NAMES, "q8_0")


def kernel_name(dtype: str) -> str:
    """`dtype` as the build constants WEIGHT and KV."""
    return KERNEL_NAMES.get(dtype, dtype)


def dtype_of_kernel(name: str) -> str:
    """The dtype that `kernel_name` calls so."""
    return next((dtype for dtype, own in KERNEL_NAMES.items() if own == name), name)


def tile_bytes(k: int, dtype: str) -> int:
    """Bytes of 16 rows of k columns."""
    if dtype in QUANTIZED:
        return k // QUANTIZED[dtype].block * QUANTIZED[dtype].tile_bytes
    return TILE_ROWS * k * ITEM_BYTES[dtype]


def kv_row_bytes(head_dim: int, kv_dtype: str) -> int:
    """Bytes of a key or a value of one head in the cache; 16 of them lie together (kernels/common/kv_cache.cl)."""
    return tile_bytes(head_dim, kv_dtype) // TILE_ROWS


def is_rounded(kv_dtype: str, weight_dtype: str) -> bool:
    """Whether attention may round what meets a cache (AttentionShape.exact_queries): to 8 bits beside a quantised one,
    to bfloat16 where the products of prefill round activations, too, for "native" (as stored) and bfloat16 weights.
    """
    return kv_dtype in QUANTIZED or weight_dtype not in ("float32", "float16")


def check_kv_dtype(kv_dtype: str, head_dim: int) -> str:
    """Raises UsageError for what no cache can hold, or none for heads of that many dimensions."""
    if kv_dtype not in KV_DTYPES:
        raise UsageError(f"kv_dtype is {shown(kv_dtype)}; expected auto, {', '.join(KV_DTYPES)}")
    if kv_dtype in QUANTIZED and head_dim % (block := QUANTIZED[kv_dtype].block):
        raise UsageError(
            f"the model has a head_dim of {head_dim}, which a {kv_dtype} KV cache cannot hold: it needs a multiple of "
            f"{block}; use --kv-dtype float16 (kv_dtype)"
        )
    return kv_dtype


def check_dtype(dtype: str, option: str, *others: str) -> str:
    """`dtype` if it is a floating-point type; raises UsageError otherwise, naming `others` as expected, too."""
    if not isinstance(dtype, str) or dtype not in KERNEL_NAMES:
        raise UsageError(f"{option} is {shown(dtype)}; expected auto, {', '.join([*KERNEL_NAMES, *others])}")
    return dtype

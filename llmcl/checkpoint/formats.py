"""How numbers are stored in checkpoints: block sizes."""

from __future__ import annotations

from llmcl.errors import CheckpointError

# format: (values in a block, bytes of a block). A row of a matrix is a whole number of blocks.
BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}

FLOAT_FORMATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def row_bytes(name: str, format: str, n_values: int) -> int:
    """Bytes of one row of `n_values` values. Raises CheckpointError, with the tensor's name, for half a block."""
    block_values, block_bytes = BLOCKS[format]
    if n_values % block_values:
        raise CheckpointError(
            f"tensor {name}: rows of {n_values} values are not a whole number of {format} blocks of "
            f"{block_values}. The file is damaged or badly converted; fetch it again."
        )
    return n_values // block_values * block_bytes

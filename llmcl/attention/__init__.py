"""Programmable attention: score_mod and mask_mod are Python functions compiled into the kernels.

`flex_attention` and `create_block_mask` follow PyTorch's names and semantics. A mod may use operators, `where` and the
functions listed here, and the NumPy and PyTorch equivalents.
"""

from llmcl.attention import masks
from llmcl.attention.block_mask import BlockMask, and_masks, create_block_mask, or_masks
from llmcl.attention.flex import AuxOutput, AuxRequest, default_device, flex_attention, release_memory
from llmcl.attention.functions import absolute, exp, exp2, log, maximum, minimum, sigmoid, sqrt, tanh, where
from llmcl.attention.functions import absolute as abs
from llmcl.attention.functions import maximum as max
from llmcl.attention.functions import minimum as min

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "abs",
    "absolute",
    "and_masks",
    "create_block_mask",
    "default_device",
    "exp",
    "exp2",
    "flex_attention",
    "log",
    "masks",
    "max",
    "maximum",
    "min",
    "minimum",
    "or_masks",
    "release_memory",
    "sigmoid",
    "sqrt",
    "tanh",
    "where",
]

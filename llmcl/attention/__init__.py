"""Attention as a programming model: score_mod and mask_mod in Python, compiled into the kernels.

`flex_attention` and `create_block_mask` carry PyTorch's names and meanings; the functions below `where` are what a mod
may call beside operators (NumPy's and PyTorch's do as well).
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

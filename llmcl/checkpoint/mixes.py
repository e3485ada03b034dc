"""Mixed-format files: the format that llama.cpp gives each tensor, by mix name.

Not reproduced: llama.cpp's special cases for models with exactly 8 experts and for 70B models.
"""

from __future__ import annotations

import re

from llmcl.checkpoint.formats import FORMATS

# Formats for most tensors; for tensors sensitive to few bits; for fused queries, keys and values.
MIXES = {"q4_k_m": ("Q4_K", "Q6_K", "Q5_K"), "q5_k_m": ("Q5_K", "Q6_K", "Q6_K")}
# Fallback if rows are not a whole number of blocks.
_SMALLER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_WITH_MORE_BITS = (".v_proj.weight", ".down_proj.weight", ".w2.weight")
_FUSED = (".qkv_proj.weight", ".in_proj_qkv.weight")


def mixed_format(tensor: str, columns: int, mix: str, n_layers: int, *, tied: bool) -> str:
    """Returns the format of a two-dimensional tensor (Hugging Face name). tied: the embedding is also the output head.

    The head gets more bits. So do value and down projections in about half the layers: the first eighth, the last
    eighth, and every third layer between.
    """
    few, more, of_fused = MIXES[mix]
    if (layer := _LAYER.search(tensor)) is None:
        format = more if tensor == "lm_head.weight" or tied else few
    elif tensor.endswith(_FUSED):
        format = of_fused
    else:
        i, eighth = int(layer[1]), n_layers // 8
        is_chosen = i < eighth or i >= 7 * n_layers // 8 or (i - eighth) % 3 == 2
        format = more if is_chosen and tensor.endswith(_WITH_MORE_BITS) else few
    return _SMALLER_BLOCKS[format] if columns % FORMATS[format].block else format

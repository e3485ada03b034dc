"""Files whose tensors differ in format: which tensor llama.cpp stores in which, by the name of the mix.

Left out is what llama.cpp does for a model of exactly 8 experts and for one of 70B.
"""

from __future__ import annotations

import re

from llmcl.checkpoint.formats import FORMATS

# Most tensors; those that lose most by few bits; queries, keys and values in one tensor.
MIXES = {"q4_k_m": ("Q4_K", "Q6_K", "Q5_K"), "q5_k_m": ("Q5_K", "Q6_K", "Q6_K")}
# Where rows are no whole blocks of that.
_SMALLER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_WITH_MORE_BITS = (".v_proj.weight", ".down_proj.weight", ".w2.weight")
_FUSED = (".qkv_proj.weight", ".in_proj_qkv.weight")


def mixed_format(tensor: str, columns: int, mix: str, n_layers: int, *, tied: bool) -> str:
    """The format of a tensor (Hugging Face name) of two dimensions. tied: the embedding is the output head, too.

    The head has more bits, and in about half of the layers the values and what leaves the MLP: in the first eighth, in
    the last eighth, and in every third between.
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

"""Files whose tensors differ in format: which tensor llama.cpp stores in which, by the name of the mix.

Of dense models and mixtures of experts whose queries, keys and values are tensors of their own.
"""

from __future__ import annotations

import re

# Most tensors, and those that lose most by few bits.
MIXES = {"q4_k_m": ("Q4_K", "Q6_K"), "q5_k_m": ("Q5_K", "Q6_K")}
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_WITH_MORE_BITS = ("v_proj.weight", "down_proj.weight", ".w2.weight")


def mixed_format(tensor: str, mix: str, n_layers: int, *, tied: bool) -> str:
    """The format of a tensor (Hugging Face name) of two dimensions. tied: the embedding is the output head, too.

    The head has more bits, and in about half of the layers the values and what leaves the MLP: in the first eighth, in
    the last eighth, and in every third between.
    """
    few, more = MIXES[mix]
    if (layer := _LAYER.search(tensor)) is None:
        return more if tensor == "lm_head.weight" or tied else few
    i, eighth = int(layer[1]), n_layers // 8
    is_chosen = i < eighth or i >= 7 * n_layers // 8 or (i - eighth) % 3 == 2
    return more if is_chosen and tensor.endswith(_WITH_MORE_BITS) else few

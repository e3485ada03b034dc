"""Keys of Muse Glimmer's config.json in the words of other families."""

from __future__ import annotations

from typing import Any

from llmcl.architectures.config import limits
from llmcl.architectures.config.reader import Reader, unsupported
from llmcl.errors import shown

_FULL = 4  # every fourth layer, counted from the last, has neither a window nor a rotation


def muse_keys(read: Reader) -> dict[str, Any]:
    """Returns layer_types and no_rope_layers. layer_rope_theta has a theta per layer, 0 without rotation."""
    n_layers = read.size("num_hidden_layers", limits.MAX_LAYERS)
    is_full = [(n_layers - 1 - i) % _FULL == 0 for i in range(n_layers)]
    keys: dict[str, Any] = {"no_rope_layers": [int(not full) for full in is_full]}
    if read.get("layer_types") is None:
        keys["layer_types"] = ["full_attention" if full else "sliding_attention" for full in is_full]
    thetas = read.get("layer_rope_theta")
    if thetas is None:
        return keys
    if not isinstance(thetas, list) or len(thetas) != n_layers or not all(type(t) in (int, float) for t in thetas):
        read.fail("layer_rope_theta", thetas, f"a number for each of {n_layers} layers")
    rope = read.table("rope_parameters") or read
    if rotated := {*thetas} - {0, rope.get("rope_theta", 10000.0)}:
        unsupported(f"rotary settings that differ between layers (layer_rope_theta {shown(sorted(rotated))})")
    return {**keys, "no_rope_layers": [int(theta != 0) for theta in thetas]}

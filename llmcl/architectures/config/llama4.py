"""Keys of Llama 4's config.json in the words of other families."""

from __future__ import annotations

from typing import Any

from llmcl.architectures.config import limits
from llmcl.architectures.config.reader import Reader, unsupported
from llmcl.architectures.families.blocks import QueryScale
from llmcl.errors import shown


def llama4_keys(read: Reader) -> dict[str, Any]:
    """Returns the sizes of experts and MLPs, and the layers without experts.

    layer_types repeats no_rope_layers: layers that rotate attend in chunks.
    """
    n_layers = read.size("num_hidden_layers", limits.MAX_LAYERS)
    step = read.size("interleave_moe_layer_step", limits.MAX_LAYERS)
    with_experts = read.get("moe_layers", [*range(step - 1, n_layers, step)])
    if not isinstance(with_experts, list) or any(type(i) is not int for i in with_experts):
        read.fail("moe_layers", with_experts, "a list of layers")
    return {
        "moe_intermediate_size": read.size("intermediate_size", limits.MAX_INTERMEDIATE),
        "intermediate_size": read.size("intermediate_size_mlp", limits.MAX_INTERMEDIATE),
        "mlp_only_layers": [i for i in range(n_layers) if i not in with_experts],
        "no_rope_layers": read.get("no_rope_layers") or None,
        "layer_types": None,
        "given_layer_types": read.get("layer_types"),
    }


def chunk_from_hf(read: Reader, rotates: list[bool]) -> int | None:
    """Reads the tokens per chunk. Raises UnsupportedModelError for layers of other types."""
    chunk = None
    if read.get("attention_chunk_size") is not None:
        chunk = read.size("attention_chunk_size", limits.MAX_WINDOW)
    types = ["chunked_attention" if rotated and chunk is not None else "full_attention" for rotated in rotates]
    if (listed := read.get("given_layer_types")) is not None and listed != types:
        unsupported(f"layers of these types beside these rotations (layer_types {shown(listed)})")
    return chunk


def temperature_from_hf(read: Reader) -> QueryScale | None:
    """Reads how the scores of layers without rotation grow with the query's position."""
    if not read.flag("attn_temperature_tuning", default=False):
        return None
    beta = read.number("attn_scale", -limits.MAX_SCALE, limits.MAX_SCALE)
    return QueryScale(beta, read.size("floor_scale", limits.MAX_POSITION), offset=1)

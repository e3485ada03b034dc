"""Models with layers that have heads of their own: what transformers and GGUF files say of them."""

from __future__ import annotations

from typing import Any

from expert_weights import experts_of
from numpy.typing import NDArray

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families import FAMILIES
from llmcl.architectures.families.blocks import GatedMlp


def width_of(config: ModelConfig, layer: int) -> int:
    """`GatedMlp.width`; 1 for a layer without."""
    return next((block.width for block in config.layers[layer] if isinstance(block, GatedMlp)), 1)


def own_heads_options(config: ModelConfig) -> dict[str, Any]:
    """Keys of transformers' configuration."""
    if not FAMILIES[config.architecture].own_heads:
        return {}
    last = config.attention(config.n_layers - 1)  # transformers has none with a window there
    heads = last.heads_in(config)
    return {
        "global_head_dim": heads.size,
        "attention_k_eq_v": last.keys_as_values,
        "num_global_key_value_heads": heads.n_kv,
        "hidden_size_per_layer_input": config.layer_input_size,
        "vocab_size_per_layer_input": config.vocab_size,
        "num_kv_shared_layers": len(config.attention_layers) - len(config.cached_layers),
        "use_double_wide_mlp": any(width_of(config, i) > 1 for i in range(config.n_layers)),
        "enable_moe_block": bool(experts_of(config)),
    }


def as_own_heads_need(config: ModelConfig, name: str, values: NDArray[Any]) -> NDArray[Any]:
    """Random numbers of a norm or a factor: factors are around 1; norms of heads are small where scores are not scaled,
    or one key alone would count.
    """
    if name.endswith(("layer_scalar", ".scale", "_scale")):
        return 1.0 + values
    if config.attention_scale == 1.0 and name.endswith(("q_norm.weight", "k_norm.weight")):
        scaled: NDArray[Any] = 1.4 * len(values) ** -0.25 * values
        return scaled
    return values


def write_own_heads(writer: Any, config: ModelConfig) -> None:
    """Metadata of a GGUF file beside those of other families, for its GGUFWriter."""
    if not FAMILIES[config.architecture].own_heads:
        return
    main = config.rotated_size("main")
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_rope_dimension_count(main)
    writer.add_shared_kv_layers(len(config.attention_layers) - len(config.cached_layers))
    writer.add_embedding_length_per_layer_input(config.layer_input_size)
    writer.add_rope_dimension_count_swa(config.head_dim)


def own_name(name: str) -> str | None:
    """The name of a tensor in a GGUF file for which the package `gguf` has none."""
    for module, own in (("router.scale", "ffn_gate_inp.scale"), ("router.per_expert_scale", "ffn_down_exps.scale")):
        if name.endswith(module):
            return f"blk.{name.split('.')[2]}.{own}"
    return None

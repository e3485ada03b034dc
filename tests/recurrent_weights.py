"""Recurrent models as transformers has them: names and shapes of their weights, settings of their configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families import FAMILIES
from llmcl.architectures.families.blocks import Attention, Experts, layer_name
from llmcl.architectures.families.plain_mlp import PlainMlp
from llmcl.architectures.families.recurrent import (
    DeltaNet,
    DeltaSettings,
    Mamba,
    MambaSettings,
    RecurrentBlock,
    ShortConv,
)
from llmcl.checkpoint.quantize import is_convolution


def recurrent_of(config: ModelConfig) -> dict[int, RecurrentBlock]:
    """The recurrent block of each layer that has one."""
    return {i: block for i, blocks in enumerate(config.layers) for block in blocks if isinstance(block, RecurrentBlock)}


def as_stored(config: ModelConfig, weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The weights under the names that transformers has, convolutions as [channels, 1, length]."""
    modules = {own: stored for stored, own in FAMILIES[config.architecture].modules.items()}
    found = {}
    for name, values in weights.items():
        module, _, suffix = name.rpartition(".")
        own = next((own for own in modules if module == own or module.endswith(f".{own}")), None)
        if own is not None:
            name = f"{module.removesuffix(own)}{modules[own]}.{suffix}"
        found[name] = values[:, None] if is_convolution(name) else values
    return found


def recurrent_options(config: ModelConfig) -> dict[str, Any]:
    """Keys of transformers' configuration; the layers are in the order of `recurrent_of`."""
    blocks = recurrent_of(config)
    if not blocks:
        return {}
    kind = FAMILIES[config.architecture].recurrent
    kinds = [kind if i in blocks else "full_attention" for i in range(config.n_layers)]
    options: dict[str, Any] = {"layer_types": kinds}
    block = next(iter(blocks.values()))
    if isinstance(block, ShortConv):
        options |= {"conv_L_cache": block.settings.length, "block_auto_adjust_ff_dim": False}
        options |= {"norm_eps": config.rms_norm_eps, "conv_bias": block.settings.bias}
    if isinstance(block, DeltaNet):
        of = block.settings
        options |= {"linear_num_key_heads": of.n_k, "linear_num_value_heads": of.n_v}
        options |= {"linear_key_head_dim": of.d_k, "linear_value_head_dim": of.d_v, "linear_conv_kernel_dim": of.length}
    if isinstance(block, Mamba) and config.architecture == "nemotron_h":
        return _nemotron_options(config, block.settings)
    if isinstance(block, Mamba):
        options |= _mamba_options(config, block.settings)
    return options


def _mamba_options(config: ModelConfig, of: MambaSettings) -> dict[str, Any]:
    blocks = recurrent_of(config)
    rotations = {config.attention(i).rotation for i in config.attention_layers}
    return {
        "layer_types": ["linear_attention" if i in blocks else "full_attention" for i in range(config.n_layers)],
        "mamba_n_heads": of.n_heads,
        "mamba_d_head": of.d_head,
        "mamba_n_groups": of.n_groups,
        "mamba_d_state": of.d_state,
        "mamba_d_conv": of.length,
        "mamba_conv_bias": of.conv_bias,
        "mamba_expand": of.inner // config.hidden_size,
        "time_step_limit": (of.least_step, of.most_step),
        "position_embedding_type": "rope" if rotations == {"main"} else None,
    }


def _nemotron_options(config: ModelConfig, of: MambaSettings) -> dict[str, Any]:
    """transformers clamps the time steps of a prompt, not of an answer, at time_step_min; other engines do not."""
    names = {Mamba: "linear_attention", Attention: "full_attention", PlainMlp: "mlp", Experts: "moe"}
    return {
        "layers_block_type": [names[type(block)] for (block,) in config.layers],
        "mamba_num_heads": of.n_heads,
        "mamba_head_dim": of.d_head,
        "n_groups": of.n_groups,
        "ssm_state_size": of.d_state,
        "conv_kernel": of.length,
        "use_conv_bias": of.conv_bias,
        "layer_norm_epsilon": config.rms_norm_eps,
        "time_step_min": 0.0,
    }


def as_in_gguf(config: ModelConfig, weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The weights as llama.cpp's converter orders them: value heads with other key heads in turn, or with joined
    projections q, k, v and z each in one piece; A itself.

    Under the names of `as_stored`, convolutions as [channels, length].
    """
    found = {
        name: values[:, 0] if is_convolution(name) else values for name, values in as_stored(config, weights).items()
    }
    for i, block in recurrent_of(config).items():
        if isinstance(block, DeltaNet):
            prefix, of = layer_name(i, "linear_attn."), block.settings
            for name in [name for name in found if name.startswith(prefix)] if not of.joined else ():
                found[name] = _in_turn(name.removeprefix(prefix), found[name], of)
            if "qkvz" in of.joined:
                heads = found.pop(prefix + "in_proj_qkvz.weight").reshape(of.n_k, -1, config.hidden_size)
                ends = np.cumsum([of.d_k, of.d_k, of.n_v // of.n_k * of.d_v])
                *qkv, z = (part.reshape(-1, config.hidden_size) for part in np.split(heads, ends, axis=1))
                found |= {prefix + "in_proj_qkv.weight": np.concatenate(qkv), prefix + "in_proj_z.weight": z}
            found[prefix + "A_log"] = -np.exp(found[prefix + "A_log"])
            found[prefix + "dt_proj.bias"] = found.pop(prefix + "dt_bias")
        if isinstance(block, Mamba):
            module = "mixer." if config.architecture == "nemotron_h" else "mamba."
            prefix, groups = layer_name(i, module), block.settings.n_groups
            found[prefix + "A_log"] = -np.exp(found[prefix + "A_log"])[:, None]
            found[prefix + "D"] = found[prefix + "D"][:, None]
            found[prefix + "norm.weight"] = found[prefix + "norm.weight"].reshape(groups, -1)
            found[prefix + "dt_proj.bias"] = found.pop(prefix + "dt_bias")
    if config.architecture == "nemotron_h":
        found = {name.replace("model.", "backbone.", 1): values for name, values in found.items()}
    return found


def _in_turn(name: str, values: NDArray[Any], of: DeltaSettings) -> NDArray[Any]:
    heads = (
        np.arange(of.n_v).reshape(of.n_k, -1).T.ravel()
    )  # of the first value head of each key head, of the second ..
    columns = (heads[:, None] * of.d_v + np.arange(of.d_v)).ravel()
    if name in ("in_proj_qkv.weight", "conv1d.weight"):
        n = of.channels - len(columns)
        return np.concatenate([values[:n], values[n:][columns]])
    if name == "in_proj_z.weight":
        return values[columns]
    if name == "out_proj.weight":
        return values[:, columns]
    return values if name == "norm.weight" else values[heads]

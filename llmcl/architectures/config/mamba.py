"""Reads Mamba-2 mixers, and the keys of the families that have them, from config.json or GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from llmcl.architectures.config import limits
from llmcl.architectures.config.reader import Reader, unsupported
from llmcl.architectures.families.recurrent import MambaSettings
from llmcl.errors import CheckpointError

MAX_STATE = 256  # of a head's keys or values: see recurrent.py
_MIXER, _ATTENTION = "mamba", "full_attention"
_KINDS = {"mamba": _MIXER, "linear_attention": _MIXER, "attention": _ATTENTION, "full_attention": _ATTENTION}
_KINDS |= {"mlp": "mlp", "moe": "moe"}
_LETTERS = {"M": _MIXER, "*": _ATTENTION, "-": "mlp", "E": "moe"}
_KIND_KEYS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
_NEMOTRON_KEYS = {
    "rms_norm_eps": "layer_norm_epsilon",
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
}


def granite_hybrid_keys(read: Reader) -> dict[str, Any]:
    """Returns the layers' types under one name each, and the MLP's rows, which without experts are the shared ones'."""
    n_layers = read.size("num_hidden_layers", limits.MAX_LAYERS)
    kinds = read.get("layer_types", [_MIXER] * n_layers)
    if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds):
        kinds = [_KINDS.get(kind, kind) for kind in kinds]
    values: dict[str, Any] = {"layer_types": kinds}
    if read.get("num_local_experts") == 0:
        values["intermediate_size"] = read.size("shared_intermediate_size", limits.MAX_INTERMEDIATE)
    return values


def nemotron_h_keys(read: Reader) -> dict[str, Any]:
    """Returns the layers' types under one name each, and sizes under Granite's keys."""
    kinds = next((kinds for key in _KIND_KEYS if (kinds := read.get(key)) is not None), None)
    names = _LETTERS if isinstance(kinds, str) else _KINDS
    if not isinstance(kinds, (str, list)) or any(not isinstance(kind, str) or kind not in names for kind in kinds):
        read.fail("layers_block_type", kinds, f"a list of {', '.join(_KINDS)}, or hybrid_override_pattern")
    others = {key: read.get(other) for key, other in _NEMOTRON_KEYS.items()}
    head_dim = {"head_dim": read.get("attention_head_dim", read.get("head_dim"))}
    return {**others, **head_dim, "layer_types": [names[kind] for kind in kinds], "num_hidden_layers": len(kinds)}


def mamba_from_hf(read: Reader) -> MambaSettings:
    """Reads Granite's keys. The size of a head may be "auto"."""
    n_heads = read.size("mamba_n_heads", limits.MAX_HEADS)
    inner = read.size("mamba_expand", limits.MAX_HIDDEN, default=2) * read.size("hidden_size", limits.MAX_HIDDEN)
    automatic = read.get("mamba_d_head") in (None, "auto")
    d_head = max(inner // n_heads, 1) if automatic else read.size("mamba_d_head", limits.MAX_HEAD_DIM)
    if read.flag("mamba_proj_bias", default=False):
        unsupported("projections of Mamba with a bias (mamba_proj_bias true)")
    least, most = _step_limits(read)
    settings = MambaSettings(
        n_heads,
        d_head,
        read.size("mamba_n_groups", limits.MAX_HEADS),
        read.size("mamba_d_state", limits.MAX_HEAD_DIM),
        read.size("mamba_d_conv", limits.MAX_CONV_LENGTH, minimum=2),
        read.flag("mamba_conv_bias", default=True),
        least_step=least,
        most_step=most,
    )
    return _checked(settings, read.source)


def _step_limits(read: Reader) -> tuple[float, float]:
    """Reads the least and the largest time step. transformers writes infinity as an object."""
    limit = read.get("time_step_limit", [0.0, math.inf])
    values = [
        float(x["__float__"]) if isinstance(x, Mapping) and x.get("__float__") == "Infinity" else x
        for x in (limit if isinstance(limit, (list, tuple)) else ())
    ]
    if len(values) != 2 or any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in values):
        read.fail("time_step_limit", limit, "two numbers")
    least, most = values
    if not 0 <= least <= most:
        read.fail("time_step_limit", limit, "two numbers from 0 on, the smaller first")
    return float(least), float(most)


def mamba_from_gguf(read: Reader, arch: str, tensor_names: Collection[str]) -> MambaSettings:
    n_heads = read.size(f"{arch}.ssm.time_step_rank", limits.MAX_HEADS)
    settings = MambaSettings(
        n_heads,
        read.size(f"{arch}.ssm.inner_size", limits.MAX_INTERMEDIATE) // n_heads,
        read.size(f"{arch}.ssm.group_count", limits.MAX_HEADS),
        read.size(f"{arch}.ssm.state_size", limits.MAX_HEAD_DIM),
        read.size(f"{arch}.ssm.conv_kernel", limits.MAX_CONV_LENGTH, minimum=2),
        any(name.endswith(".ssm_conv1d.bias") for name in tensor_names),
        log_decays=False,
    )
    return _checked(settings, read.source)


def _checked(settings: MambaSettings, source: str) -> MambaSettings:
    """Refuses sizes that do not match, or that the kernels cannot handle."""
    if settings.n_heads % settings.n_groups:
        raise CheckpointError(
            f"{source}: {settings.n_heads} heads of Mamba cannot share {settings.n_groups} groups evenly. The "
            "checkpoint is damaged or not what it claims to be; fetch or convert it again."
        )
    for name, size in (("heads", settings.d_head), ("states", settings.d_state)):
        if size % limits.SIZE_MULTIPLE or not 0 < size <= MAX_STATE:
            unsupported(
                f"{name} of {size} in Mamba",
                f"they must be a multiple of {limits.SIZE_MULTIPLE} and at most {MAX_STATE}",
            )
    return settings

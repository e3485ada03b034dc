"""Reads each layer's recurrent block from config.json or GGUF metadata."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from llmcl.architectures.config import limits
from llmcl.architectures.config.heads import kv_heads_from_gguf
from llmcl.architectures.config.mamba import mamba_from_gguf, mamba_from_hf
from llmcl.architectures.config.reader import Reader, unsupported
from llmcl.architectures.families.family import Family
from llmcl.architectures.families.recurrent import DeltaSettings, RecurrentSettings, ShortConvSettings
from llmcl.errors import CheckpointError

MAX_DELTA_HEAD = 256  # a work-item holds a column, or part of a column, of a head's state
Recurrent = list[RecurrentSettings | None]  # per layer; None: attention


def recurrent_from_hf(read: Reader, family: Family, n_layers: int) -> Recurrent:
    """Reads `layer_types`, or if missing a list of attention layers (LFM2) or the interval between them (Qwen 3.5)."""
    if family.recurrent is None:
        return [None] * n_layers
    kinds = read.get("layer_types")
    if kinds is None and family.recurrent == "linear_attention":
        interval = read.size("full_attention_interval", limits.MAX_LAYERS)
        kinds = ["full_attention" if (i + 1) % interval == 0 else family.recurrent for i in range(n_layers)]
    elif kinds is None:
        attends = read.get("full_attn_idxs", [*range(n_layers)])
        if not isinstance(attends, list) or any(type(i) is not int for i in attends):
            read.fail("full_attn_idxs", attends, "a list of layers")
        kinds = ["full_attention" if i in attends else family.recurrent for i in range(n_layers)]
    if not isinstance(kinds, list) or len(kinds) != n_layers:
        read.fail("layer_types", kinds, f"the types of {n_layers} layers")
    settings: RecurrentSettings
    if family.recurrent == "mamba":
        settings = mamba_from_hf(read)
    elif family.recurrent == "conv":
        length = read.size("conv_L_cache", limits.MAX_CONV_LENGTH, minimum=2)
        settings = ShortConvSettings(length, read.flag("conv_bias", default=False))
    else:
        settings = _checked(
            DeltaSettings(
                read.size("linear_num_key_heads", limits.MAX_HEADS),
                read.size("linear_num_value_heads", limits.MAX_HEADS),
                read.size("linear_key_head_dim", limits.MAX_HEAD_DIM),
                read.size("linear_value_head_dim", limits.MAX_HEAD_DIM),
                read.size("linear_conv_kernel_dim", limits.MAX_CONV_LENGTH, minimum=2),
                joined=family.joined_inputs,
            ),
            read.source,
        )
    return [settings if kind == family.recurrent else None for kind in kinds]


def parts_from_hf(read: Reader, family: Family, n_layers: int) -> list[str]:
    """Returns `LayerSettings.part` for each layer."""
    if not family.single_blocks:
        return ["both"] * n_layers
    return ["mlp" if kind in ("mlp", "moe") else "mixer" for kind in read.get("layer_types")]


def parts_from_gguf(read: Reader, arch: str, family: Family, n_kv_heads: Sequence[int]) -> list[str]:
    """Returns `LayerSettings.part` for each layer: an MLP has rows, attention has heads."""
    n_layers, key = len(n_kv_heads), f"{arch}.feed_forward_length"
    if not family.single_blocks:
        return ["both"] * n_layers
    rows = read.get(key)
    if not isinstance(rows, np.ndarray) or rows.dtype.kind not in "iu" or len(rows) < n_layers:
        read.fail(key, rows, f"the rows of {n_layers} layers")
    return ["mlp" if n and not heads else "mixer" for n, heads in zip(rows.tolist(), n_kv_heads, strict=False)]


def recurrent_from_gguf(
    read: Reader, arch: str, family: Family, n_layers: int, tensor_names: Collection[str]
) -> Recurrent:
    """Reads the recurrent layers: without key and value heads, or all except every interval-th (Qwen 3.5)."""
    if family.recurrent is None:
        return [None] * n_layers
    if family.recurrent == "linear_attention":
        n_v = read.size(f"{arch}.ssm.time_step_rank", limits.MAX_HEADS)
        delta = DeltaSettings(
            read.size(f"{arch}.ssm.group_count", limits.MAX_HEADS),
            n_v,
            read.size(f"{arch}.ssm.state_size", limits.MAX_HEAD_DIM),
            read.size(f"{arch}.ssm.inner_size", limits.MAX_INTERMEDIATE) // n_v,
            read.size(f"{arch}.ssm.conv_kernel", limits.MAX_CONV_LENGTH, minimum=2),
            # llama.cpp's converter reorders the heads if the projections were separate
            in_turn=not family.joined_inputs,
            log_decays=False,
            joined=tuple(name for name in family.joined_inputs if _is_there(name, family, tensor_names)),
        )
        interval = read.size(f"{arch}.full_attention_interval", limits.MAX_LAYERS, default=4)
        _checked(delta, read.source)
        return [None if (i + 1) % interval == 0 else delta for i in range(n_layers)]
    settings: RecurrentSettings
    if family.recurrent == "mamba":
        settings = mamba_from_gguf(read, arch, tensor_names)
    else:
        settings = ShortConvSettings(read.size(f"{arch}.shortconv.l_cache", limits.MAX_CONV_LENGTH, minimum=2))
    return [None if heads else settings for heads in kv_heads_from_gguf(read, arch, family, n_layers)]


def _is_there(joined: str, family: Family, tensor_names: Collection[str]) -> bool:
    """Returns whether a GGUF file has a joined projection. Later llama.cpp converters split joined projections."""
    module = f"linear_attn.in_proj_{joined}"
    names = [f".{name}.weight" for name, hf_module in family.gguf_modules.items() if hf_module == module]
    return any(tensor.endswith(name) for tensor in tensor_names for name in names)


def _checked(of: DeltaSettings, source: str) -> DeltaSettings:
    """Refuses sizes that do not match, or that the kernels cannot handle."""
    if of.n_v % of.n_k:
        raise CheckpointError(
            f"{source}: {of.n_v} value heads of the delta net cannot share {of.n_k} key heads evenly. The checkpoint "
            "is damaged or not what it claims to be; fetch or convert it again."
        )
    for name, size in (("keys", of.d_k), ("values", of.d_v)):
        if size % limits.SIZE_MULTIPLE or not 0 < size <= MAX_DELTA_HEAD:
            unsupported(
                f"heads of {size} for the {name} of the delta net",
                f"they must be a multiple of {limits.SIZE_MULTIPLE} and at most {MAX_DELTA_HEAD}",
            )
    return of

"""Reads the sizes of latent attention from config.json or GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping

from llmcl.architectures.config import limits
from llmcl.architectures.config.reader import Reader, unsupported
from llmcl.architectures.config.rope import RopeScaling, rotary_settings, yarn_amplitude
from llmcl.architectures.families.family import Family
from llmcl.architectures.families.latent import LatentSettings

MAX_ROPE = 256  # a work-item holds a head's rotated values


def latent_from_hf(read: Reader, family: Family) -> LatentSettings | None:
    """Reads the sizes, or returns None for a family without latent attention."""
    if not family.latent:
        return None
    query_rank = 0
    if read.get("q_lora_rank") is not None:
        query_rank = read.size("q_lora_rank", limits.MAX_HIDDEN)
    return _checked(
        LatentSettings(
            read.size("kv_lora_rank", limits.MAX_HEAD_DIM),
            read.size("qk_rope_head_dim", MAX_ROPE),
            read.size("qk_nope_head_dim", limits.MAX_HEAD_DIM),
            read.size("v_head_dim", limits.MAX_HEAD_DIM),
            query_rank,
            read.flag("rope_interleave", default=True),
        )
    )


def latent_from_gguf(read: Reader, arch: str, family: Family) -> LatentSettings | None:
    """Reads the sizes; None without latent attention. Older files have head sizes under different keys."""
    if not family.latent:
        return None
    attention = f"{arch}.attention"
    key, value = (
        name if read.get(name) is not None else name.removesuffix("_mla")
        for name in (f"{attention}.key_length_mla", f"{attention}.value_length_mla")
    )
    rope = read.size(f"{arch}.rope.dimension_count", MAX_ROPE)
    query = read.size(key, limits.MAX_HEAD_DIM, minimum=rope + 1)
    return _checked(
        LatentSettings(
            read.size(f"{attention}.kv_lora_rank", limits.MAX_HEAD_DIM),
            rope,
            query - rope,
            read.size(value, limits.MAX_HEAD_DIM),
            read.size(f"{attention}.q_lora_rank", limits.MAX_HIDDEN, default=0, minimum=0),
        )
    )


def latent_scale(of: LatentSettings, scaling: RopeScaling | None, log_multiplier: float) -> float:
    """Returns the factor on the scores: 1 / sqrt(query head size), times a squared amplitude with YaRN."""
    amplitude = yarn_amplitude(scaling.factor, log_multiplier) if scaling is not None and log_multiplier else 1.0
    return amplitude**2 / math.sqrt(of.query)


def log_multiplier_from_hf(read: Reader) -> float:
    """Returns mscale_all_dim from the rotary settings, or 0."""
    rope = rotary_settings(read)
    if rope is None or any(isinstance(value, Mapping) for value in rope.values.values()):
        return 0.0
    if rope.get("rope_type", rope.get("type", "default")) == "default":
        return 0.0
    return rope.number("mscale_all_dim", -1.0, limits.MAX_SCALE, default=0.0)


def log_multiplier_from_gguf(read: Reader, arch: str) -> float:
    """Returns mscale_all_dim, or 0. For this architecture llama.cpp's converter writes a tenth of the value."""
    return 10.0 * read.number(f"{arch}.rope.scaling.yarn_log_multiplier", -1.0, limits.MAX_SCALE, default=0.0)


def _checked(of: LatentSettings) -> LatentSettings:
    """Refuses sizes that the kernels cannot handle."""
    sizes = {"latents": of.rank, "rotated keys": of.rope, "queries": of.nope, "values": of.value}
    for name, size in (sizes | {"projections of queries": of.query_rank}).items():
        if size % limits.SIZE_MULTIPLE:
            unsupported(
                f"latent attention with {name} of {size} numbers", f"it must be a multiple of {limits.SIZE_MULTIPLE}"
            )
    return of

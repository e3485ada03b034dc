"""Reads rotary settings from checkpoints. `rope_values.py` computes the frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmcl.architectures.config.limits import MAX_HEAD_DIM, MAX_POSITION, MAX_SCALE
from llmcl.architectures.config.reader import Reader, unsupported
from llmcl.architectures.config.rope_axes import axes_from_hf
from llmcl.architectures.families.blocks import QueryScale
from llmcl.architectures.families.family import Family
from llmcl.errors import CheckpointError, shown

# Keeps frequencies finite in float32.
_MIN_ROPE_FACTOR, _MAX_ROPE_FACTOR = 1e-6, 1e6
MAX_THETA = 1e15
KINDS = "linear", "llama3", "yarn", "longrope", "dynamic", "proportional"
# llama.cpp's converter writes larger factors for pairs that do not rotate.
_NO_ROTATION = 1e29


@dataclass(frozen=True)
class RopeScaling:
    """Changes to the rotary frequencies theta^(-2i/dim), where dim is the number of rotated head dimensions.

    "linear" divides all frequencies by `factor`. "llama3" divides low frequencies and blends in between. "factors"
    divides frequency i by `factors[i]` (inf: no rotation), then by `factor` (GGUF's tensor rope_freqs.weight, and
    "proportional" in config.json). "yarn" divides frequencies below beta_slow turns in original_max_position tokens,
    keeps frequencies above beta_fast turns, and blends in between. "longrope" divides frequency i by `factors[i]`, or
    by `long_factors[i]` if the text exceeds original_max_position. "dynamic" raises theta if the text exceeds
    original_max_position.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: blend from and to whole pairs
    amplitude: float = 1.0  # factor on cosines and sines


def rope_from_hf(read: Reader, family: Family, head_dim: int, max_position: int) -> dict[str, Any]:
    """Returns rope_theta, rope_scaling, rotary_dim, rope_axes and local_rope_theta for a ModelConfig.

    The sources are `rope_parameters` (transformers 5), possibly with an object per layer kind, or the older
    `rope_theta`, `rope_local_base_freq`, `partial_rotary_factor` and `rope_scaling`.
    """
    theta = read.number("rope_theta", 1.0, MAX_THETA, default=10000.0)
    rope = rotary_settings(read)
    local_theta = None
    if family.local_rope:
        local_theta = read.number("rope_local_base_freq", 1.0, MAX_THETA, default=theta)
        if rope is not None and (local := rope.table("sliding_attention")) is not None:
            local_theta = local.number("rope_theta", 1.0, MAX_THETA, default=local_theta)
            if (kind := local.text("rope_type", default=local.text("type", default="default"))) != "default":
                unsupported(f"the rotary scaling {shown(kind)} in layers with a window", "it supports default")
        if rope is not None and (rope.get("sliding_attention") or rope.get("full_attention")) is not None:
            rope = rope.table("full_attention")
            if rope is not None:  # transformers may repeat both kinds' settings inside
                rope = Reader({k: v for k, v in rope.values.items() if not isinstance(v, Mapping)}, rope.source)
    sources = [read] if rope is None else [rope, read]
    share = next((source for source in sources if source.get("partial_rotary_factor") is not None), None)
    rotary_dim = None
    if rope is not None and _kind(rope, family) == "proportional":  # part of the scaling settings
        share = None
    if family.latent:  # the sizes of latent attention say it
        share = None
    if share is not None and (factor := share.number("partial_rotary_factor", 0.0, 1e15)) != 1.0:
        rotary_dim = int(head_dim * factor)
        if not family.partial_rotation or not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
            unsupported(f"partial rotary embeddings (partial_rotary_factor {factor:g}) in this architecture")
    rope = Reader({}, read.source) if rope is None else rope
    if any(isinstance(value, Mapping) for value in rope.values.values()):
        unsupported("rotary settings that differ between layers")
    theta = rope.number("rope_theta", 1.0, MAX_THETA, default=theta)
    if family.rope_alpha and _kind(rope, family) == "dynamic" and rope.get("alpha"):
        alpha = rope.number("alpha", 0.0, _MAX_ROPE_FACTOR)
        theta *= alpha ** (head_dim / max(head_dim - 2, 1))
        rope = Reader({"rope_type": "default"}, rope.source)
    return {
        "rope_theta": theta,
        "rope_scaling": _scaling(read, rope, family, rotary_dim or head_dim, max_position),
        "rotary_dim": rotary_dim,
        "rope_axes": axes_from_hf(rope, family, (rotary_dim or head_dim) // 2),
        "local_rope_theta": local_theta,
    }


def rotary_dim_keys(read: Reader) -> dict[str, Any]:
    """Returns partial_rotary_factor for a config.json that has rotary_dim instead."""
    if read.get("rotary_dim") is None or read.get("partial_rotary_factor") is not None:
        return {}
    head_dim = read.size("head_dim", MAX_HEAD_DIM)
    return {"partial_rotary_factor": read.size("rotary_dim", head_dim) / head_dim}


def rotary_settings(read: Reader) -> Reader | None:
    """Returns the object with the rotary settings. `rope_scaling` overrides `rope_parameters`, as in transformers.

    If `rope_parameters` has settings per layer kind, `rope_scaling` changes only full attention.
    """
    parameters, scaling = read.table("rope_parameters"), read.table("rope_scaling")
    if scaling is None or not scaling.values:
        return parameters
    full = None if parameters is None else parameters.table("full_attention")
    if parameters is None or full is None:
        return scaling
    return Reader({**parameters.values, "full_attention": {**full.values, **scaling.values}}, scaling.source)


def query_scale_from_hf(read: Reader) -> QueryScale | None:
    rope = rotary_settings(read)
    if rope is None or rope.get("llama_4_scaling_beta") is None:
        return None
    beta = rope.number("llama_4_scaling_beta", -MAX_SCALE, MAX_SCALE)
    return QueryScale(beta, rope.size("original_max_position_embeddings", MAX_POSITION)) if beta else None


def query_scale_from_gguf(read: Reader, architecture: str) -> QueryScale | None:
    beta = read.number(f"{architecture}.attention.temperature_scale", -MAX_SCALE, MAX_SCALE, default=0.0)
    if not beta:
        return None
    return QueryScale(beta, read.size(f"{architecture}.rope.scaling.original_context_length", MAX_POSITION))


def _scaling(read: Reader, rope: Reader, family: Family, rotary_dim: int, max_position: int) -> RopeScaling | None:
    """Reads the scaling. rope: the object with the rotary settings. read: the whole config.json."""
    kind = _kind(rope, family)
    if kind == "default":
        return None
    if kind not in KINDS:
        unsupported(f"the rotary scaling {shown(kind)}", f"it supports default, {', '.join(KINDS)}")
    if kind == "linear":
        return RopeScaling("linear", _factor(rope))
    if kind == "proportional":
        n_pairs, share = rotary_dim // 2, rope.number("partial_rotary_factor", 0.0, 1.0, default=1.0)
        n_rotated = int(share * rotary_dim // 2)
        factors = (1.0,) * n_rotated + (math.inf,) * (n_pairs - n_rotated)
        return RopeScaling("factors", _factor(rope, 1.0), factors=factors)
    if kind == "dynamic":
        return RopeScaling("dynamic", rope.number("factor", 0.0, _MAX_ROPE_FACTOR), original_max_position=max_position)
    key = "original_max_position_embeddings"
    original = (rope if read.get(key) is None else read).size(key, MAX_POSITION, default=max_position)
    if kind == "llama3":
        low = rope.number("low_freq_factor", _MIN_ROPE_FACTOR, _MAX_ROPE_FACTOR)
        return RopeScaling(
            "llama3",
            _factor(rope),
            low_freq_factor=low,
            high_freq_factor=rope.number("high_freq_factor", low, _MAX_ROPE_FACTOR),
            original_max_position=original,
        )
    factor = _factor(rope, max_position / original)
    if kind == "longrope":
        return RopeScaling(
            "longrope",
            original_max_position=original,
            factors=_factors(rope, "short_factor", rotary_dim),
            long_factors=_factors(rope, "long_factor", rotary_dim),
            amplitude=_amplitude(rope, longrope_amplitude(factor, original)),
        )
    mscale, all_dim = (rope.number(key, -1.0, MAX_SCALE, default=0.0) for key in ("mscale", "mscale_all_dim"))
    has_both = mscale > 0 and all_dim > 0
    usual = yarn_amplitude(factor, mscale) / yarn_amplitude(factor, all_dim) if has_both else yarn_amplitude(factor)
    beta_slow = rope.number("beta_slow", 0.0, MAX_SCALE, default=1.0)
    return RopeScaling(
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", beta_slow, MAX_SCALE, default=32.0),
        beta_slow=beta_slow,
        truncate=rope.flag("truncate", default=True),
        amplitude=_amplitude(rope, usual),
    )


def _kind(rope: Reader, family: Family) -> str:
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    return family.rope_kinds.get(kind, kind)


def yarn_amplitude(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def longrope_amplitude(factor: float, original_max_position: int) -> float:
    """Returns the amplitude from Ding et al., "LongRoPE", 2024."""
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(max(original_max_position, 2)))


def _factor(rope: Reader, default: float | None = None) -> float:
    return rope.number("factor", _MIN_ROPE_FACTOR, _MAX_ROPE_FACTOR, default=default)


def _amplitude(rope: Reader, default: float) -> float:
    return rope.number("attention_factor", 0.0, MAX_SCALE, default=default)


def _factors(rope: Reader, key: str, rotary_dim: int) -> tuple[float, ...]:
    values = rope.get(key)
    if not isinstance(values, list) or any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in values):
        rope.fail(key, values, "a list of numbers")
    return checked_factors(values, rotary_dim, f"{rope.source}: {key}")


def checked_factors(
    values: Sequence[float], rotary_dim: int, what: str, *, may_stop: bool = False
) -> tuple[float, ...]:
    """Checks the frequency factors. what: their location, for errors. may_stop: huge factors become inf."""
    if len(values) != rotary_dim // 2:
        raise CheckpointError(
            f"{what}: {len(values)} values, expected {rotary_dim // 2} (half of the head's rotated dimensions)."
        )
    stops = [may_stop and _NO_ROTATION <= value < math.inf for value in values]
    if not all(
        _MIN_ROPE_FACTOR < value <= _MAX_ROPE_FACTOR for value, stop in zip(values, stops, strict=True) if not stop
    ):
        raise CheckpointError(
            f"{what}: a value is not finite and positive, or absurd; fetch or convert the file again."
        )
    return tuple(math.inf if stop else float(value) for value, stop in zip(values, stops, strict=True))


@dataclass(frozen=True)
class GgufFactors:
    """Contents of the tensors rope_freqs.weight, rope_factors_short.weight and rope_factors_long.weight."""

    of_all: Sequence[float] | None = None
    short: Sequence[float] | None = None
    long: Sequence[float] | None = None


def scaling_from_gguf(
    read: Reader, architecture: str, family: Family, tensors: GgufFactors, rotary_dim: int, max_position: int
) -> RopeScaling | None:
    prefix = f"{architecture}.rope.scaling."
    kind = read.text(f"{prefix}type", default="none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        unsupported(f"the rotary scaling {shown(kind)} ({prefix}type)", "it supports none, linear, yarn and longrope")
    if tensors.short is not None or tensors.long is not None:
        if tensors.short is None or tensors.long is None:
            raise CheckpointError(
                "of rope_factors_short.weight and rope_factors_long.weight one is missing; fetch or convert the file "
                "again."
            )
        original = read.size(f"{prefix}original_context_length", MAX_POSITION, default=max_position)
        usual = longrope_amplitude(max_position / original, original)
        return RopeScaling(
            "longrope",
            original_max_position=original,
            factors=checked_factors(tensors.short, rotary_dim, "rope_factors_short.weight"),
            long_factors=checked_factors(tensors.long, rotary_dim, "rope_factors_long.weight"),
            amplitude=read.number(f"{prefix}attn_factor", 0.0, MAX_SCALE, default=usual),
        )
    if kind == "longrope":
        raise CheckpointError(
            f"GGUF metadata: {prefix}type is longrope, but rope_factors_short.weight and rope_factors_long.weight are "
            "missing. Without them the model cannot be computed; fetch or convert the file again."
        )
    if kind == "yarn":
        original = read.size(f"{prefix}original_context_length", MAX_POSITION, default=max_position)
        factor = read.number(f"{prefix}factor", _MIN_ROPE_FACTOR, _MAX_ROPE_FACTOR)
        all_dim = read.number(f"{prefix}yarn_log_multiplier", -1.0, MAX_SCALE, default=0.0)
        # With a log multiplier the paper's two scales are equal and cancel.
        usual = 1.0 if all_dim > 0 else yarn_amplitude(factor)
        beta_slow = read.number(f"{prefix}yarn_beta_slow", 0.0, MAX_SCALE, default=1.0)
        return RopeScaling(
            "yarn",
            factor,
            original_max_position=original,
            beta_fast=read.number(f"{prefix}yarn_beta_fast", beta_slow, MAX_SCALE, default=32.0),
            beta_slow=beta_slow,
            truncate=family.gguf_yarn_truncates,
            amplitude=read.number(f"{prefix}attn_factor", 0.0, MAX_SCALE, default=usual),
        )
    # Files from 2023 have only the older key.
    old_factor = read.number(f"{architecture}.rope.scale_linear", _MIN_ROPE_FACTOR, _MAX_ROPE_FACTOR, default=1.0)
    factor = (
        read.number(f"{prefix}factor", _MIN_ROPE_FACTOR, _MAX_ROPE_FACTOR, default=1.0)
        if kind == "linear"
        else old_factor
    )
    if tensors.of_all is not None:
        factors = checked_factors(tensors.of_all, rotary_dim, "rope_freqs.weight", may_stop=True)
        return RopeScaling("factors", factor, factors=factors)
    return None if factor == 1.0 else RopeScaling("linear", factor)

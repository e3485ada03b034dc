"""The user's functions in a kernel: two traced Python functions become the two that the attention kernels call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llmcl.attention.block_test import MASK_RANGE, block_test
from llmcl.attention.tracing.trace import TracedMod, trace_mask_mod, trace_score_mod
from llmcl.kernels.common.mods import NO_MODS, ModCode, Mods
from llmcl.runtime.device import Device

ScoreMod = Callable[..., Any]
MaskMod = Callable[..., Any]


def bind_mods(
    device: Device, score_mod: TracedMod | None, mask_mod: TracedMod | None, tables: Sequence[str] = ()
) -> Mods:
    """Traced mods as OpenCL C functions `score_mod` and `mask_mod`, their captured arrays copied to the device.

    tables: names of int arrays that are the kernels' arguments before those.
    """
    if score_mod is None and mask_mod is None and not tables:
        return NO_MODS
    buffers = [
        device.upload(capture.array, f"{capture.label} of a {mod.kind}")
        for mod in (score_mod, mask_mod)
        if mod is not None
        for capture in mod.captures
    ]
    score = None if score_mod is None else ModCode(score_mod.body(), score_mod.body(16), _arrays(score_mod))
    mask = None
    if mask_mod is not None:
        mask = ModCode(
            mask_mod.body(),
            mask_mod.body(16),
            _arrays(mask_mod),
            block=block_test(mask_mod),
            helpers=MASK_RANGE,
            per_head="h" in mask_mod.depends,
        )
    return Mods(score, mask, tuple(buffers), tuple(tables))


def _arrays(mod: TracedMod) -> tuple[tuple[str, str], ...]:
    """Type and name of each captured array."""
    return tuple(("float" if capture.dtype == "float32" else "int", capture.name) for capture in mod.captures)


def trace_mods(
    score_mod: ScoreMod | TracedMod | None, mask_mod: MaskMod | TracedMod | None
) -> tuple[TracedMod | None, TracedMod | None]:
    """Both functions with names of their own for temporaries and captures, ready for `bind_mods`."""
    return (
        None if score_mod is None else trace_score_mod(score_mod, prefix="score"),
        None if mask_mod is None else trace_mask_mod(mask_mod, prefix="mask"),
    )

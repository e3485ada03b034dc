"""Turns a user's two traced functions into the two functions that the attention kernels call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmcl.attention.block_test import MASK_RANGE, block_test
from llmcl.attention.tracing.graph import Capture
from llmcl.attention.tracing.intervals import bounds
from llmcl.attention.tracing.score_form import score_form
from llmcl.attention.tracing.trace import TracedMod, trace_mask_mod, trace_score_mod
from llmcl.kernels.common.mods import NO_MODS, ModCode, Mods, fragment_macros
from llmcl.runtime.device import Buffer, Device

ScoreMod = Callable[..., Any]
MaskMod = Callable[..., Any]
SMALL = 1 << 22


def bind_mods(
    device: Device, score_mod: TracedMod | None, mask_mod: TracedMod | None, tables: Sequence[str] = ()
) -> Mods:
    """Writes traced mods as OpenCL C functions `score_mod` and `mask_mod` and copies captured arrays to the device.

    tables: names of int arrays that precede the captures in the kernels' arguments.
    """
    if score_mod is None and mask_mod is None and not tables:
        return NO_MODS
    buffers = [
        _on(device, capture, f"{capture.label} of a {mod.kind}")
        for mod in (score_mod, mask_mod)
        if mod is not None
        for capture in mod.captures
    ]
    score = None
    if score_mod is not None:
        bodies, form = (score_mod.body(), score_mod.body(16)), score_form(score_mod)
        macros = (form.body(), form.unit, form.factor, form.slope_body(), form.is_soft_cap)
        arrays = _arrays(score_mod)
        fragment = fragment_macros(*macros, has_arrays=bool(arrays))
        score = ModCode(*bodies, arrays, per_sequence="b" in score_mod.depends, fragment=fragment)
    mask = None
    if mask_mod is not None:
        mask = ModCode(
            mask_mod.body(),
            mask_mod.body(16),
            _arrays(mask_mod),
            block=block_test(mask_mod),
            helpers=MASK_RANGE,
            per_head="h" in mask_mod.depends,
            per_sequence="b" in mask_mod.depends,
        )
    return Mods(score, mask, tuple(buffers), tuple(tables))


class _UsersMemory(Buffer):
    """Device memory owned by the user: release does nothing."""

    __slots__ = ()

    def release(self) -> None:
        pass


def _on(device: Device, capture: Capture, name: str) -> Buffer:
    """Returns a captured array on the device: the user's own array if possible, so kernels see later writes."""
    source = capture.source
    if source is not None and source.context == device.context:
        return _UsersMemory(device, source.base_data, 0, name)
    return device.upload(capture.array, name)


def _arrays(mod: TracedMod) -> tuple[tuple[str, str], ...]:
    """Returns type and name for each captured array."""
    return tuple(("float" if capture.dtype == "float32" else "int", capture.name) for capture in mod.captures)


def makes_floats_of_small_ints(mod: TracedMod, B: int, H: int, Q_LEN: int, KV_LEN: int) -> bool:
    """Whether every int that the mod converts to float is below 2^22 in magnitude, for positions, batches and heads
    within these limits (build constant SMALL_INTS)."""
    unknown = np.asarray(np.nan, np.float32)
    last = {"b": B - 1, "h": H - 1, "q_idx": Q_LEN - 1, "kv_idx": KV_LEN - 1}
    ranges = {"score": (unknown, unknown)} | {name: (np.asarray(0), np.asarray(n)) for name, n in last.items()}
    graph = mod.graph
    if any(capture.source is not None and capture.dtype == "int32" for capture in mod.captures):
        return False  # the values may change
    for number in graph.reachable(mod.root):
        node = graph.nodes[number]
        if node.op != "cast" or node.dtype != "float32" or graph.nodes[node.args[0]].dtype != "int32":
            continue
        low, high, unsafe = bounds(graph, node.args[0], ranges, np.float32)
        if unsafe.any() or low.min() <= -SMALL or high.max() >= SMALL:
            return False
    return True


def trace_mods(
    score_mod: ScoreMod | TracedMod | None, mask_mod: MaskMod | TracedMod | None
) -> tuple[TracedMod | None, TracedMod | None]:
    """Traces both functions with separate prefixes for temporaries and captures, ready for `bind_mods`."""
    return (
        None if score_mod is None else trace_score_mod(score_mod, prefix="score"),
        None if mask_mod is None else trace_mask_mod(mask_mod, prefix="mask"),
    )

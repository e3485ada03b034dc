"""The user's functions in a kernel: two traced Python functions become the two that the attention kernels call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llmcl.attention.block_test import MASK_RANGE, block_test
from llmcl.attention.tracing.trace import TracedMod, trace_mask_mod, trace_score_mod
from llmcl.kernels.common.attention import NO_MODS, Mods
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
    scalar, wide, flags, buffers = "", "", "", []
    params = "".join(f", __global const int* {name}" for name in tables)
    args = "".join(f", {name}" for name in tables)
    for kind, mod in (("score", score_mod), ("mask", mask_mod)):
        if mod is None:
            continue
        for capture in mod.captures:
            params += f", __global const {'float' if capture.dtype == 'float32' else 'int'}* {capture.name}"
            args += f", {capture.name}"
            buffers.append(device.upload(capture.array, f"{capture.label} of a {kind}_mod"))
        flags += f"#define HAS_{kind.upper()}_MOD 1\n"
        wide += _function(mod, 16)
        if kind == "score":
            flags += _macro("SCORE_MOD_BODY", f"{{ {mod.body()} }}")
        else:
            flags += f"#define MASK_PER_HEAD {int('h' in mod.depends)}\n"
            scalar = (
                f"{_function(mod, 1)}{MASK_RANGE}inline int mask_block(const int b, const int h, const int q_first, "
                f"const int q_last, const int kv_first, const int kv_last MOD_PARAMS) {{\n{block_test(mod)}\n}}\n"
            )
    defined = {"MOD_PARAMS": params, "MOD_ARGS": args, "SCALAR_MODS": scalar, "WIDE_MODS": wide}
    return Mods("".join(_macro(name, text) for name, text in defined.items()) + flags, tuple(buffers))


def _macro(name: str, text: str) -> str:
    return f"#define {name} {text.replace(chr(10), ' ')}\n"


def _function(mod: TracedMod, lanes: int) -> str:
    """`score_mod` or `mask_mod` for one key, `score_mod16` or `mask_mod16` for 16."""
    width = "" if lanes == 1 else str(lanes)
    first = f"const float{width} score, " if mod.kind == "score_mod" else ""
    return (
        f"inline {'float' if mod.kind == 'score_mod' else 'int'}{width} {mod.kind}{width}({first}const int b, "
        f"const int h, const int q_idx, const int{width} kv_idx MOD_PARAMS) {{\n{mod.body(lanes)}\n}}\n"
    )


def trace_mods(
    score_mod: ScoreMod | TracedMod | None, mask_mod: MaskMod | TracedMod | None
) -> tuple[TracedMod | None, TracedMod | None]:
    """Both functions with names of their own for temporaries and captures, ready for `bind_mods`."""
    return (
        None if score_mod is None else trace_score_mod(score_mod, prefix="score"),
        None if mask_mod is None else trace_mask_mod(mask_mod, prefix="mask"),
    )

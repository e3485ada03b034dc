"""The user's functions in a kernel: two traced Python functions become the two that the attention kernels call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmcl.attention.block_test import MASK_RANGE, block_test
from llmcl.attention.trace import TracedMod, trace_mask_mod, trace_score_mod
from llmcl.runtime.device import Buffer, Device

ScoreMod = Callable[..., Any]
MaskMod = Callable[..., Any]


@dataclass(frozen=True)
class Mods:
    """What a launch needs: OpenCL C in front of the kernel, and the arrays that it looks up as further arguments."""

    prelude: str = ""
    buffers: tuple[Buffer, ...] = ()


NO_MODS = Mods()


def bind_mods(device: Device, score_mod: TracedMod | None, mask_mod: TracedMod | None) -> Mods:
    """Traced mods as OpenCL C functions `score_mod` and `mask_mod`, their captured arrays copied to the device."""
    if score_mod is None and mask_mod is None:
        return NO_MODS
    head, scalar, wide, params, args, buffers = "", [], [], "", "", []
    for kind, mod in (("score", score_mod), ("mask", mask_mod)):
        if mod is None:
            continue
        for capture in mod.captures:
            params += f", __global const {'float' if capture.dtype == 'float32' else 'int'}* {capture.name}"
            args += f", {capture.name}"
            buffers.append(device.upload(capture.array, f"{capture.label} of a {kind}_mod"))
        head += f"#define HAS_{kind.upper()}_MOD 1\n"
        scalar.append(_function(mod, 1).replace("\n", " "))
        wide.append(_function(mod, 16).replace("\n", " "))
        if kind == "mask":
            head += f"#define MASK_PER_HEAD {int('h' in mod.depends)}\n"
            block = (
                f"{MASK_RANGE}inline int mask_block(const int b, const int h, const int q_first, const int q_last, "
                f"const int kv_first, const int kv_last MOD_PARAMS) {{\n{block_test(mod)}\n}}\n"
            )
            scalar.append(block.replace("\n", " "))
    hooks = f"#define SCALAR_MODS {' '.join(scalar)}\n#define WIDE_MODS {' '.join(wide)}\n"
    return Mods(f"#define MOD_PARAMS {params}\n#define MOD_ARGS {args}\n{hooks}{head}", tuple(buffers))


def _function(mod: TracedMod, lanes: int) -> str:
    """`score_mod` or `mask_mod` for one key, `score_mod16` or `mask_mod16` for 16."""
    width = "" if lanes == 1 else str(lanes)
    first = f"const float{width} score, " if mod.kind == "score_mod" else ""
    return (
        f"inline {'float' if mod.kind == 'score_mod' else 'int'}{width} {mod.kind}{width}({first}const int b, "
        f"const int h, const int q_idx, const int{width} kv_idx MOD_PARAMS) {{\n{mod.source(lanes).body}\n}}\n"
    )


def trace_mods(
    score_mod: ScoreMod | TracedMod | None, mask_mod: MaskMod | TracedMod | None
) -> tuple[TracedMod | None, TracedMod | None]:
    """Both functions with names of their own for temporaries and captures, ready for `bind_mods`."""
    return (
        None if score_mod is None else trace_score_mod(score_mod, prefix="score"),
        None if mask_mod is None else trace_mask_mod(mask_mod, prefix="mask"),
    )

"""Instruction sets: which one the tests run with, and how those above it are hidden from a driver.

LLMCL_TEST_INSTRUCTIONS=avx2 makes Intel's CPU driver compile for a processor with AVX2 alone. The tests then run on
that driver only, since others have no such switch. Programs and answers of probes are kept apart: the driver's variable
is part of what the cache knows as the processor (llmcl/runtime/processor.py).

`python tests/instructions.py` prints the set that the processor has.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "LLMCL_TEST_INSTRUCTIONS"
TARGET = "CL_CONFIG_CPU_TARGET_ARCH"


@dataclass(frozen=True)
class InstructionSet:
    """target: the driver's name for a processor with it. flags: what it adds to the set before, in Linux's words."""

    target: str
    flags: tuple[str, ...]


# Each has those before it. The last needs no target: llmcl has no kernel for what is above it (AMX).
SETS = {
    "sse4.2": InstructionSet("corei7", ("sse4_2",)),
    "avx2": InstructionSet("core-avx2", ("avx2", "fma", "f16c")),
    "avx512": InstructionSet("skylake-avx512", ("avx512f", "avx512bw", "avx512vl")),
    "vnni": InstructionSet("icelake-server", ("avx512_vnni",)),
    "bf16": InstructionSet("", ("avx512_bf16",)),
}


def sets_of(cpuinfo: str) -> list[str]:
    """The sets of a processor that /proc/cpuinfo describes, the smallest first."""
    listed = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    flags = set(listed[1].split()) if listed else set()
    names = []
    for name, one in SETS.items():
        if not flags.issuperset(one.flags):
            break
        names.append(name)
    return names


def own_sets() -> list[str]:
    path = Path("/proc/cpuinfo")
    return sets_of(path.read_text()) if path.exists() else []


def used_sets() -> list[str]:
    """Those that are not hidden."""
    sets, wanted = own_sets(), os.environ.get(VARIABLE, "")
    return sets[: sets.index(wanted) + 1] if wanted else sets


def offers(flag: str) -> bool:
    """Whether the tests' processor has what one of SETS adds."""
    return any(flag in SETS[name].flags for name in used_sets())


def hide() -> None:
    """Hides the sets above the one that LLMCL_TEST_INSTRUCTIONS names, from drivers that are not loaded yet.

    Raises ValueError where it names none, or one that the processor lacks.
    """
    wanted = os.environ.get(VARIABLE, "")
    if not wanted:
        return
    if wanted not in SETS:
        raise ValueError(f"{VARIABLE} is {wanted!r}; expected one of {', '.join(SETS)}")
    if wanted not in own_sets():
        raise ValueError(
            f"{VARIABLE} is {wanted}, which this processor lacks; it has {', '.join(own_sets()) or 'none'}"
        )
    if wanted != own_sets()[-1]:
        os.environ[TARGET] = SETS[wanted].target
    os.environ.setdefault("LLMCL_TEST_DEVICE", "intel-cpu")


def in_words() -> str:
    """Which set a run used, for its summary."""
    sets, used = own_sets(), used_sets()
    if not used:
        return "instructions: not known"
    hidden = f"; hidden: {', '.join(sets[len(used) :])}" if len(used) < len(sets) else ""
    return f"instructions: {used[-1]}{hidden}"


if __name__ == "__main__":
    print((own_sets() or [""])[-1])

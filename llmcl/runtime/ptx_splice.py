"""Instructions that NVIDIA's OpenCL compiler rejects, inserted into the PTX text that serves as a program's binary.

The compiler targets an architecture in general (sm_90), without instructions that only the exact architecture has
(sm_90a: Hopper's wgmma and setmaxnreg). A kernel writes such an instruction as a comment in inline assembly, operands
included:

    asm volatile("//sm_90a wgmma.commit_group.sync.aligned;" : : : "memory");

The compiler keeps the comment and fills in the operands. `splice` removes the mark and raises the target, and the
driver then assembles for the actual device. If a driver's binaries are not PTX, or the driver rejects the text, the
build fails: `wgmma.py` tests this before such a kernel is chosen.
"""

from __future__ import annotations

import re

MARK = "//sm_90a "
_MARKED = re.compile(rf"^(\s*){re.escape(MARK)}", re.MULTILINE)
_TARGET = re.compile(r"^(\.target\s+)sm_90\b", re.MULTILINE)


def needs_splice(source: str) -> bool:
    """Returns whether a program's OpenCL C contains marked instructions."""
    return MARK in source


def splice(ptx: str) -> str:
    """Returns the PTX with marked comments turned into instructions and the target sm_90a.

    Raises ValueError if the text is not PTX for sm_90, or if the compiler dropped the comments.
    """
    text, targets = _TARGET.subn(r"\1sm_90a", ptx)
    if targets != 1:
        raise ValueError(f"expected PTX with one line '.target sm_90', found {targets}")
    text, instructions = _MARKED.subn(r"\1", text)
    if instructions == 0:
        raise ValueError(f"expected lines that begin with {MARK!r}, found none")
    return text

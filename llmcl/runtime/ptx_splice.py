"""Instructions that NVIDIA's OpenCL compiler refuses, put into the PTX text that it leaves as a program's binary.

That compiler assembles for the general target of an architecture (sm_90), which lacks the instructions that only the
exact architecture has (sm_90a: Hopper's wgmma and setmaxnreg). A kernel writes them in inline assembly as a comment,

    asm volatile("//sm_90a wgmma.commit_group.sync.aligned;" : : : "memory");

operands and all. The compiler keeps the comment and fills in its operands; `splice` removes the mark and raises the
target, and the driver assembles the text for what the device is. A driver whose binaries are not PTX, or that refuses
the text, makes the build fail: `wgmma.py` finds that out before such a kernel is chosen.
"""

from __future__ import annotations

import re

MARK = "//sm_90a "
_MARKED = re.compile(rf"^(\s*){re.escape(MARK)}", re.MULTILINE)
_TARGET = re.compile(r"^(\.target\s+)sm_90\b", re.MULTILINE)


def needs_splice(source: str) -> bool:
    """Whether a program's OpenCL C has instructions to put in."""
    return MARK in source


def splice(ptx: str) -> str:
    """The PTX with its marked comments made instructions and its target made sm_90a.

    Raises ValueError if the text is no PTX for sm_90, or if the compiler dropped the comments.
    """
    text, targets = _TARGET.subn(r"\1sm_90a", ptx)
    if targets != 1:
        raise ValueError(f"expected PTX with one line '.target sm_90', found {targets}")
    text, instructions = _MARKED.subn(r"\1", text)
    if instructions == 0:
        raise ValueError(f"expected lines that begin with {MARK!r}, found none")
    return text

"""The processor that a CPU driver compiles for: machines with the same device name may differ in instructions.

Machines may share a cache folder, and a driver's variable may hide instructions from one process.
"""

from __future__ import annotations

import os
import platform
import re
from itertools import takewhile
from pathlib import Path

# The relevant lines in /proc/cpuinfo, on x86-64 and AArch64.
_LINES = ("model name", "flags", "CPU implementer", "CPU part", "Features")
# Variables by which Intel's driver and PoCL choose an architecture or pass options to the compiler.
_VARIABLES = re.compile(r"CL_CONFIG_\w+|POCL_(LLVM|EXTRA|KERNELLIB)_\w+")


def processor(root: Path = Path("/")) -> str:
    """Returns the first core's name and instruction sets, plus compiler variables from the environment."""
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)]
    try:
        with (root / "proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            lines = [line.rstrip() for line in takewhile(str.strip, file) if line.startswith(_LINES)]
    except OSError:
        lines = [platform.processor()]
    return "\n".join((*lines, *variables))

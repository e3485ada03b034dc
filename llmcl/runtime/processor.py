"""What a CPU driver compiles for: machines with one name for their device differ in their instructions.

A cache folder may be shared by machines, and a driver's variable may hide instructions from one process.
"""

from __future__ import annotations

import os
import platform
import re
from itertools import takewhile
from pathlib import Path

# The lines of /proc/cpuinfo that say it, on x86-64 and on AArch64.
_LINES = ("model name", "flags", "CPU implementer", "CPU part", "Features")
# Intel's driver and PoCL: the variables that choose an architecture or pass options on to the compiler.
_VARIABLES = re.compile(r"CL_CONFIG_\w+|POCL_(LLVM|EXTRA|KERNELLIB)_\w+")


def processor(root: Path = Path("/")) -> str:
    """The first core's name and instruction sets, and what the environment tells drivers about compilation."""
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)]
    try:
        with (root / "proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            lines = [line.rstrip() for line in takewhile(str.strip, file) if line.startswith(_LINES)]
    except OSError:
        lines = [platform.processor()]
    return "\n".join((*lines, *variables))

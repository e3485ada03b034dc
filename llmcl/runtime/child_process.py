"""Python in child processes: which interpreter is started, what it may import, and one that runs to its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def interpreter() -> str:
    """The Python to start: this one, or where Python is embedded, that of the same version it belongs to.

    Raises OSError where there is none, as in a program frozen into one file.
    """
    if not getattr(sys, "frozen", False):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        folder = Path(sys.base_prefix)
        for program in (sys.executable or "", str(folder / "bin" / f"python{version}"), str(folder / "python.exe")):
            if re.match("python|pypy", os.path.basename(program)) and os.path.isfile(program):
                return program
    raise OSError(f"{sys.executable or 'this program'} embeds Python, and no interpreter is beside it")


def environment() -> dict[str, str]:
    """This process's variables for a child that imports llmcl and whatever else this process can import."""
    paths = [str(Path(__file__).parents[2]), *sys.path, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(
    arguments: Sequence[str],
    limit_s: float,
    *,
    streams: Sequence[str] = ("stdout",),
    env: Mapping[str, str] | None = None,
) -> tuple[int | None, str]:
    """Runs the interpreter with these arguments to its end: its exit code, and the text that it wrote to `streams`.

    The code is None where it took longer than limit_s and was ended. env: its variables; None: those of this process.
    Raises OSError if no process can be started.
    """
    # The output goes to a file. What a driver leaves running would hold a pipe open.
    with tempfile.TemporaryFile() as output:
        files: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        files |= dict.fromkeys(streams, output)
        try:
            done = subprocess.run([interpreter(), *arguments], env=env, timeout=limit_s, check=False, **files)
            code: int | None = done.returncode
        except subprocess.TimeoutExpired:
            code = None
        output.seek(0)
        return code, output.read().decode(errors="replace").strip()

"""Python in child processes: which interpreter to start, what a child may import, and running one to its end.

A child never imports from the user's current folder, which may be a downloaded model. A child is isolated (`-I`),
searches the standard library first, then this process's import folders, and works in an empty folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# -S keeps the path to the standard library until it is saved; then site runs.
_PROGRAM = """
import sys
standard = sys.path[:]
sys.dont_write_bytecode = {no_bytecode}
import site
site.main()
sys.path[:] = dict.fromkeys([*standard, *{folders!a}, *sys.path])
import runpy
runpy.run_module({module!a}, run_name="__main__", alter_sys=True)
"""
# Variables of drivers, loaders and llmcl with file names, relative to this process's current folder.
_PATH_VARIABLES = ("LLMCL_CACHE_DIR", "OCL_ICD_VENDORS", "OCL_ICD_FILENAMES", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


def interpreter() -> str:
    """Returns the Python to start: this one, or if Python is embedded, the matching installed version.

    Raises OSError if there is none, as in a program frozen into one file.
    """
    if not getattr(sys, "frozen", False):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        folder = Path(sys.base_prefix)
        for program in (sys.executable or "", str(folder / "bin" / f"python{version}"), str(folder / "python.exe")):
            if re.match("python|pypy", os.path.basename(program)) and os.path.isfile(program):
                return os.path.abspath(program)
    raise OSError(f"{sys.executable or 'this program'} embeds Python, and no interpreter is beside it")


def import_folders() -> list[str]:
    """Returns the folders where a child finds llmcl and everything else this process can import, except the current
    folder.

    The current folder is kept if llmcl lies in it or PYTHONPATH names it.
    """
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(path)]
    paths = [path for path in sys.path if isinstance(path, str) and (path in named or not _is_here(path))]
    return list(dict.fromkeys([str(Path(__file__).absolute().parents[2]), *map(os.path.abspath, paths)]))


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command line for an isolated `python -m module`. Raises OSError like `interpreter`."""
    program = _PROGRAM.format(no_bytecode=sys.dont_write_bytecode, folders=import_folders(), module=module)
    return [interpreter(), "-I", "-S", "-c", program, *arguments]


@contextmanager
def empty_folder() -> Iterator[dict[str, Any]]:
    """Yields the options cwd and env of `subprocess` for a child in an empty folder, removed afterwards together with
    files from drivers. Raises OSError if no such folder can be made.
    """
    with tempfile.TemporaryDirectory(prefix="llmcl-child-", ignore_cleanup_errors=True) as folder:
        variables = {name: _absolute(os.environ[name]) for name in _PATH_VARIABLES if name in os.environ}
        yield {"cwd": folder, "env": {**os.environ, **variables, "TMPDIR": folder}}


def run(command: Sequence[str], limit_s: float, *, streams: Sequence[str] = ("stdout",)) -> tuple[int | None, str]:
    """Runs a command to its end in an empty folder. Returns the exit code and the text written to `streams`.

    The code is None if the command was killed after limit_s. Raises OSError if no process can be started.
    """
    # Writes output to a file: a process that a driver leaves running would keep a pipe open.
    with tempfile.TemporaryFile() as output, empty_folder() as place:
        files: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        files |= dict.fromkeys(streams, output)
        try:
            done = subprocess.run(command, timeout=limit_s, check=False, **files, **place)
            code: int | None = done.returncode
        except subprocess.TimeoutExpired:
            code = None
        output.seek(0)
        return code, output.read().decode(errors="replace").strip()


def _is_here(path: str) -> bool:
    try:
        return path == "" or os.path.samefile(path, ".")
    except OSError:  # missing folder
        return False


def _absolute(paths: str) -> str:
    """Makes relative paths in a path list absolute. Bare names are left to the linker."""
    return os.pathsep.join(
        os.path.abspath(path) if not path.startswith("~") and (os.sep in path or os.path.isdir(path)) else path
        for path in paths.split(os.pathsep)
    )

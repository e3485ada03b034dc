"""Python in child processes: which interpreter is started, what it may import, and one that runs to its end.

A child never imports a file of the folder that the user stands in, which may be a downloaded model's. It is isolated
(`-I`), searches the standard library first, then the folders that this process imports from, and works in an empty
folder.
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

# -S, so that the path holds nothing but the standard library until it was noted; then site does its work.
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
# Variables of drivers, loaders and llmcl that name files: relative to the folder that this process stands in.
_PATH_VARIABLES = ("LLMCL_CACHE_DIR", "OCL_ICD_VENDORS", "OCL_ICD_FILENAMES", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


def interpreter() -> str:
    """The Python to start: this one, or where Python is embedded, that of the same version it belongs to.

    Raises OSError where there is none, as in a program frozen into one file.
    """
    if not getattr(sys, "frozen", False):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        folder = Path(sys.base_prefix)
        for program in (sys.executable or "", str(folder / "bin" / f"python{version}"), str(folder / "python.exe")):
            if re.match("python|pypy", os.path.basename(program)) and os.path.isfile(program):
                return os.path.abspath(program)
    raise OSError(f"{sys.executable or 'this program'} embeds Python, and no interpreter is beside it")


def import_folders() -> list[str]:
    """Where a child finds llmcl and whatever else this process can import, without the current folder.

    The current folder counts where it is the one that llmcl lies in, or PYTHONPATH names it.
    """
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(path)]
    paths = [path for path in sys.path if isinstance(path, str) and (path in named or not _is_here(path))]
    return list(dict.fromkeys([str(Path(__file__).absolute().parents[2]), *map(os.path.abspath, paths)]))


def command(module: str, *arguments: str) -> list[str]:
    """What starts `python -m module` with these arguments, isolated. Raises OSError as `interpreter`."""
    program = _PROGRAM.format(no_bytecode=sys.dont_write_bytecode, folders=import_folders(), module=module)
    return [interpreter(), "-I", "-S", "-c", program, *arguments]


@contextmanager
def empty_folder() -> Iterator[dict[str, Any]]:
    """The options cwd and env of `subprocess` for a child that works in an empty folder, which is removed at the end.

    Drivers leave files there, too. Raises OSError where there can be no such folder.
    """
    with tempfile.TemporaryDirectory(prefix="llmcl-child-", ignore_cleanup_errors=True) as folder:
        variables = {name: _absolute(os.environ[name]) for name in _PATH_VARIABLES if name in os.environ}
        yield {"cwd": folder, "env": {**os.environ, **variables, "TMPDIR": folder}}


def run(command: Sequence[str], limit_s: float, *, streams: Sequence[str] = ("stdout",)) -> tuple[int | None, str]:
    """Runs a command in an empty folder to its end: its exit code, and the text that it wrote to `streams`.

    The code is None where it took longer than limit_s and was ended. Raises OSError if no process can be started.
    """
    # The output goes to a file. What a driver leaves running would hold a pipe open.
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
    except OSError:  # one that does not exist
        return False


def _absolute(paths: str) -> str:
    """A list of paths with those relative to the current folder made absolute; a bare name is the linker's to find."""
    return os.pathsep.join(
        os.path.abspath(path) if not path.startswith("~") and (os.sep in path or os.path.isdir(path)) else path
        for path in paths.split(os.pathsep)
    )

"""Makes OpenCL drivers installed by pip visible to the ICD loader, without hiding the system's drivers.

pip puts Intel's CPU driver (`libintelocl.so`) into the environment's `lib/`, where no ICD loader looks. An ICD loader
reads a folder with small text files, each naming a driver library; `OCL_ICD_VENDORS` replaces this folder. So llmcl
writes a folder with copies of the system's entries plus its own, and points the variable there. The loader in pyopencl
finds the PoCL from the package `pocl-binary-distribution` by itself.

The folder's name is a hash of the content. Environments with different drivers get different folders, and processes
that start together write the same bytes to the same place.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from llmcl.runtime import child_process
from llmcl.runtime.cache_files import cache_dir, make_folder, read_cached, read_plain, write_atomically, write_cached

INTEL_CPU_LIBRARY = "libintelocl.so"
WINDOWS_LIBRARY = Path("Library", "bin", "intelocl64.dll")  # below the environment's folder
OUR_ENTRY = "llmcl-intel-cpu.icd"
SYSTEM_VENDORS = Path("/etc/OpenCL/vendors")
USER_VARIABLES = ("OCL_ICD_VENDORS", "OCL_ICD_FILENAMES", "OPENCL_VENDOR_PATH")
# Holds our value of OCL_ICD_VENDORS, so a child process does not take it for the user's.
OUR_MARK = "LLMCL_SET_OCL_ICD_VENDORS"
MAX_BYTES = 1 << 16  # largest ICD file
PROBE_TIMEOUT_S = 30.0
REINSTALL = "reinstall it with `pip install --force-reinstall intel-opencl-rt intel-cmplr-lib-rt`"

_temporary: list[Path] = []  # temporary replacements for a cache folder

Probe = Callable[[str], str | None]  # library path or name -> problem, or None


@cache
def prepare_icd_loader() -> tuple[str, ...]:
    """Sets `OCL_ICD_VENDORS` if pip-installed drivers need it. Call before the first OpenCL call.

    Respects a value set by the user. On Windows sets `OCL_ICD_FILENAMES`. Does nothing on other systems (drivers
    register themselves there) and under Oclgrind (which replaces the loader). Returns hints for a user who misses a
    device.
    """
    if sys.platform == "win32":
        name_windows_driver(Path(sys.prefix))
        return ()
    if not sys.platform.startswith("linux") or "oclgrind" in os.environ.get("LD_PRELOAD", ""):
        return ()
    if os.environ.get(OUR_MARK) and os.environ.get("OCL_ICD_VENDORS") == os.environ[OUR_MARK]:
        del os.environ["OCL_ICD_VENDORS"]  # inherited from a parent, perhaps in another environment
    for variable in USER_VARIABLES:
        if os.environ.get(variable):
            return (f"{variable}={os.environ[variable]} is set, and only the OpenCL drivers it names are seen.",)
    entries, notes = plan_entries(vendor_folders(), library_folders(), remembered_probe)
    if entries is not None:
        folder = write_entries(cache_dir() / "icd", entries)
        os.environ["OCL_ICD_VENDORS"] = os.environ[OUR_MARK] = str(folder)
    return notes


def name_windows_driver(prefix: Path) -> None:
    """Name pip's driver for the loader in pyopencl's wheel, which opens it beside the registered ones.

    Written from the contents of the wheels; nobody has run it yet.
    """
    library = prefix / WINDOWS_LIBRARY
    if library.is_file() and not any(os.environ.get(variable) for variable in USER_VARIABLES):
        os.environ["OCL_ICD_FILENAMES"] = str(library)


def vendor_folders() -> list[Path]:
    """Returns the folders with ICD files: the system's, and a conda environment's."""
    return [SYSTEM_VENDORS, Path(sys.prefix) / "etc" / "OpenCL" / "vendors"]


def library_folders() -> list[Path]:
    """Returns the folders where installers put shared libraries from wheels, for each folder on the import path.

    A package at PREFIX/lib*/pythonX.Y/site-packages (a virtual environment, `--user`, `--prefix`) has libraries in
    PREFIX/lib. A package installed with `--target DIR` has them in DIR/lib, if the installer keeps them at all.
    """
    folders = [Path(sys.prefix) / "lib"]
    for entry in map(Path, filter(None, sys.path)):
        folders.append(entry / "lib")
        folders.extend(parent.parent / "lib" for parent in entry.parents if parent.name in ("lib", "lib64"))
    return list(dict.fromkeys(folders))


def plan_entries(
    vendors: Sequence[Path], libraries: Iterable[Path], probe: Probe
) -> tuple[dict[str, str] | None, tuple[str, ...]]:
    """Returns the ICD files to offer (file name -> library); None if the system's, `vendors[0]`, are right.

    Selects a single Intel CPU driver, because two in one process would share global state: the first that works,
    registered drivers before pip's. The notes name drivers that do not work. Without a pip driver, registered drivers
    are left to the loader untested.
    """
    system = read_vendor_folder(vendors[0])
    entries = dict(system)
    for folder in vendors[1:]:
        for name, library in read_vendor_folder(folder).items():
            if library not in entries.values():
                entries.setdefault(name, library)
    registered = [(name, library) for name, library in entries.items() if _is_intel_cpu(library)]
    from_pip = [(OUR_ENTRY, str(folder / INTEL_CPU_LIBRARY)) for folder in libraries]
    known = {os.path.realpath(library) for _, library in registered}
    from_pip = [(name, path) for name, path in from_pip if os.path.isfile(path) and os.path.realpath(path) not in known]
    notes = []
    if from_pip:
        for name, library in registered + from_pip:
            problem = probe(library)
            if problem is None:
                entries = {n: lib for n, lib in entries.items() if not _is_intel_cpu(lib)} | {name: library}
                break
            remedy = f"; {REINSTALL}" if name == OUR_ENTRY else ""
            notes.append(f"Intel's OpenCL driver {library} does not work: {problem}{remedy}.")
    return (None if entries == system else entries), tuple(notes)


def read_vendor_folder(folder: Path) -> dict[str, str]:
    """Reads a folder's ICD files in name order, skipping entries whose library is missing."""
    entries = {}
    try:
        files = sorted(folder.glob("*.icd"))
    except OSError:
        return {}
    for file in files:
        try:
            library = read_plain(file, MAX_BYTES).decode().partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError):
            continue
        if library and (not os.path.isabs(library) or os.path.isfile(library)):
            entries[file.name] = library
    return entries


def write_entries(root: Path, entries: Mapping[str, str]) -> Path:
    """Returns a folder under `root` with exactly these ICD files, or a temporary folder if `root` is not writable."""
    content = {name: library + "\n" for name, library in sorted(entries.items())}
    digest = hashlib.sha256(repr(content).encode()).hexdigest()[:16]
    folder = root / digest
    try:
        is_new = not folder.is_dir()
        make_folder(folder)
        if is_new:
            _remove_stale(root, keep=folder)
        _fill(folder, content)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="llmcl-icd-"))
        if not _temporary:
            atexit.register(loader_has_read)
        _temporary.append(folder)
        _fill(folder, content)
    return folder


def loader_has_read() -> None:
    """Removes the temporary folder, if any: a loader reads the folder only once per process.

    Also called before exit, since a process killed by a signal would leave the folder behind. A child that inherits the
    variable would find nothing there.
    """
    while _temporary:
        folder = _temporary.pop()
        shutil.rmtree(folder, ignore_errors=True)
        if os.environ.get("OCL_ICD_VENDORS") == os.environ.get(OUR_MARK) == str(folder):
            del os.environ["OCL_ICD_VENDORS"], os.environ[OUR_MARK]


def remembered_probe(library: str) -> str | None:
    """Like `probe_in_child`, but remembers success until the library or its folder changes.

    Failures are not remembered, since a missing library may be installed anywhere.
    """
    try:
        file, folder = os.stat(library), os.stat(os.path.dirname(os.path.realpath(library)))
    except OSError:
        return probe_in_child(library)  # a bare name, resolved only by the dynamic linker
    identity = repr((os.path.realpath(library), file.st_size, file.st_mtime_ns, folder.st_mtime_ns))
    memo = cache_dir() / "icd" / f"works-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if read_cached(memo, most=0) is not None:
        return None
    problem = probe_in_child(library)
    if problem is None:
        with suppress(OSError):  # a read-only home costs a probe per start
            write_cached(memo, b"")
    return problem


def probe_in_child(library: str) -> str | None:
    """Opens a context with the driver `library` in a child process (about 50 ms). Returns the problem or None."""
    script = str(Path(__file__).absolute().with_name("icd_probe.py"))
    path = os.path.abspath(library) if os.sep in library else library  # the child works in another folder
    try:
        command = [child_process.interpreter(), "-I", "-S", script, path]
        code, said = child_process.run(command, PROBE_TIMEOUT_S, streams=["stderr"])
    except OSError:
        return None  # no process can be started: let the loader try
    if code is None:
        return f"no answer within {PROBE_TIMEOUT_S:.0f} s"
    if code < 0:
        return f"it ended the process with signal {-code}"
    return None if code == 0 else (said.splitlines() or [f"exit code {code}"])[-1]


def half_installed() -> str | None:
    """Returns a hint about a pip package of Intel's driver that lacks its libraries, or None."""
    if sys.platform == "win32":
        return None
    for entry in map(Path, filter(None, sys.path)):
        if next(entry.glob("intel_opencl_rt-*.dist-info"), None) is not None:
            if any((folder / INTEL_CPU_LIBRARY).is_file() for folder in library_folders()):
                return None
            return (
                f"The package intel-opencl-rt is in {entry}, but its library {INTEL_CPU_LIBRARY} is not "
                "installed (`pip install --target` leaves it out); install it into a virtual environment."
            )
    return None


def _is_intel_cpu(library: str) -> bool:
    return os.path.basename(library).startswith(INTEL_CPU_LIBRARY)


def _fill(folder: Path, content: Mapping[str, str]) -> None:
    """Writes files that differ, each atomically, and removes all other ICD files."""
    for name, text in content.items():
        file = folder / name
        data = text.encode()
        try:
            is_same = read_plain(file, len(data), trusted=True) == data
        except OSError:
            is_same = False
        if not is_same:
            write_atomically(file, data)
    for file in folder.glob("*.icd"):
        if file.name not in content:
            file.unlink(missing_ok=True)


def _remove_stale(root: Path, keep: Path) -> None:
    """Removes folders whose libraries no longer exist, since their environments are gone."""
    for folder in root.iterdir():
        if folder != keep and folder.is_dir():
            written = sum(1 for _ in folder.glob("*.icd"))
            if written > len(read_vendor_folder(folder)):
                shutil.rmtree(folder, ignore_errors=True)

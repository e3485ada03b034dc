"""Compiles a kernel file with build constants into a program, cached on disk for the next run."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path

import pyopencl as cl

from llmcl.errors import KernelBuildError
from llmcl.progress import COMPILING, Progress
from llmcl.runtime.cache_files import UnusableError, cache_dir, is_trusted, make_folder, read_cached, write_cached
from llmcl.runtime.compilers import HAS_LATER, POLL_S, Compilers, Key, n_children
from llmcl.runtime.driver_calls import DriverCall
from llmcl.runtime.kernel_objects import new_kernel
from llmcl.runtime.platforms import POCL, DeviceEntry
from llmcl.runtime.processor import processor
from llmcl.runtime.ptx_splice import needs_splice, splice

_log = logging.getLogger(__name__)

# Denormals slow PoCL down by a factor of ten. Every kernel tolerates contraction into multiply-adds, except the kernel
# that must reproduce a file format bit for bit; it turns contraction off itself.
BUILD_OPTIONS = ("-cl-std=CL1.2", "-cl-denorms-are-zero", "-w")

REGISTER_LIMIT = "-cl-nv-maxrregcount="  # per work-item, for compilers with cl_nv_compiler_options

DIGEST_BYTES = 16

_INCLUDE = re.compile(r'^#include "([^"]+)"(  // again)?$', re.MULTILINE)


@cache
def read_source(name: str, without: tuple[str, ...] = ()) -> str:
    """Returns the text of `kernels/<name>` with `#include "..."` lines (relative to `kernels/`) resolved once each.

    A line ending with "  // again" inserts the file once more, without nested includes. without: files to leave out,
    because the text is appended to them.
    """
    included = set(without)

    def expand(file: str, again: bool = False) -> str:
        if file in included and not again:
            return ""
        included.add(file)
        text = resources.files("llmcl.kernels").joinpath(file).read_text(encoding="utf-8")
        return _INCLUDE.sub(lambda match: expand(match[1], match[2] is not None), text)

    return expand(name)


@dataclass(frozen=True)
class KernelSource:
    """Identifies a kernel: `name` in `kernels/<file>`, after `prelude`, built with `constants`."""

    file: str
    name: str
    constants: Mapping[str, object]
    prelude: str = ""  # OpenCL C put before the file, such as functions it calls

    def program(self) -> Key:
        """Returns the compilation unit: file, build constants as options, and prelude."""
        return self._key

    @cached_property
    def _key(self) -> Key:
        options = [f"-D {key}={constant_text(value)}" for key, value in sorted(self.constants.items())]
        if "MAX_REGISTERS" in self.constants:
            options.append(f"{REGISTER_LIMIT}{self.constants['MAX_REGISTERS']}")
        return self.file, " ".join(options), self.prelude


class ProgramCache:
    """One device's compiled programs, in memory and on disk.

    The key covers source, options, device, driver and platform, so an updated driver never meets an older binary. It
    also covers the processor, so no machine meets unsupported instructions.

    PoCL keeps its own cache (in `~/.cache/pocl`), so PoCL's binaries are not kept here. Asked for a binary, PoCL
    compiles every kernel in the program again for arbitrary work-group sizes, which takes longer than the whole run.
    """

    def __init__(self, context: cl.Context, device: cl.Device):
        self._context = context
        self._device = device
        self._identity = "\n".join(
            (
                device.platform.name,
                device.platform.version,
                device.name,
                device.version,
                device.driver_version,
                processor() if device.type & cl.device_type.CPU else "",
            )
        )
        self.keeps_binaries = device.platform.name != POCL  # in the cache folder
        self._is_cpu = bool(device.type & cl.device_type.CPU)
        self._programs: dict[Key, cl.Program] = {}
        self._shared: dict[tuple[str, str, str, str], cl.Kernel] = {}
        self.taken_bytes = 0  # device memory not available to children
        self._background: Compilers | None = None
        self._counted = 0  # programs from children already included in `compiled`
        self.compile_s = 0.0
        self.compiled = 0
        self.on_compile: Callable[[], None] | None = None  # called before a program is compiled

    def __len__(self) -> int:
        return len(self._programs)

    def kernel(self, source: KernelSource, *, shared: bool = False) -> cl.Kernel:
        """Returns a new kernel object, or with `shared` always the same object."""
        key = source.program()
        program = self._programs.get(key)
        if program is None:
            _, options, path = self._found(*key)
            program = self._from_disk(path, options) or self._compile(key)
            self._programs[key] = program
        if not shared:
            return new_kernel(program, source.name)
        named = (*key, source.name)
        if named not in self._shared:
            self._shared[named] = new_kernel(program, source.name)
        return self._shared[named]

    def missing(self, sources: Iterable[KernelSource], *, longest_first: bool = True) -> list[Key]:
        """Returns the programs for `sources` that are neither in memory nor on disk."""
        keys = [key for key in dict.fromkeys(source.program() for source in sources) if key not in self._programs]
        locations = {key: self._found(*key) for key in keys}
        if longest_first:  # judged by text length
            keys.sort(key=lambda key: len(locations[key][0]), reverse=True)
        try:
            if keys and is_trusted(locations[keys[0]][2].parent):
                return [key for key in keys if not locations[key][2].exists()]
        except OSError:
            pass
        return keys

    @contextmanager
    def compiling(
        self,
        entry: DeviceEntry,
        sources: Iterable[KernelSource],
        progress: Progress | None,
        later: Iterable[KernelSource] = (),
    ) -> Iterator[None]:
        """Compiles missing programs for `sources` in parallel, if faster. The rest is compiled while the context is
        open.

        Calls progress(COMPILING, done, total) for each program. later: other processes, if any were started, compile
        the missing programs for these sources afterwards (`compiles_later`).
        """
        before, keys = self.compiled, self.missing(sources)

        def report(done: int) -> None:
            if progress is not None and keys:
                progress(COMPILING, min(done, len(keys)), len(keys))

        self.compile_side_by_side(entry, keys, report, self.missing(later, longest_first=False))
        self.on_compile = lambda: report(self.compiled - before)
        try:
            yield
        finally:
            self.on_compile = None
        if self.compiled > before:
            report(len(keys))

    def compile_side_by_side(
        self, entry: DeviceEntry, keys: Sequence[Key], report: Callable[[int], None], later: Sequence[Key] = ()
    ) -> None:
        """Compiles programs in child processes and here, if faster than one after another.

        report: called with the number done so far. Programs that fail to compile are left for `kernel` to report.
        later: programs for the children to continue with; see `compiles_later`.
        """
        later = [key for key in later if key not in keys] if HAS_LATER else []
        if (background := self._background) is not None:
            keys = self._wait_for_begun(background, keys, report)
            if not keys and set(later) <= set(background.keys):
                return
            later = list(dict.fromkeys((*later, *self._end_background())))
        if not (keys or later) or not (self.keeps_binaries and can_keep()):
            return
        if not (n := n_children(entry, len(keys), len(later), self.taken_bytes)):
            return
        start, before = time.perf_counter(), (self.compiled, self.compile_s)
        here = 0
        try:
            compilers = Compilers(entry, keys, n, later)
        except OSError as error:
            _log.info("no process was started that compiles kernels: %s", error)
            return
        try:
            while (job := compilers.take()) is not None:
                report(here + len(compilers.done()))
                with suppress(KernelBuildError), DriverCall():
                    self._programs[keys[job]] = self._compile(keys[job])
                    here += 1
            while any(job < len(keys) for job in compilers.under_way()):
                report(here + len(compilers.done()))
                time.sleep(POLL_S)
            done = sum(job < len(keys) for job in compilers.done())
            for job, took in compilers.seconds().items():
                if job < len(keys):
                    _log.info("compiled %s for %s in %s s", Path(keys[job][0]).stem, self._device.name.strip(), took)
        except BaseException:
            compilers.close()
            raise
        if later:
            self._background = compilers
        else:
            compilers.close()
        if keys:
            seconds = time.perf_counter() - start
            _log.info("compiled %d programs in %d processes in %.1f s", here + done, 1 + n, seconds)
            self.compiled, self.compile_s = before[0] + here + done, before[1] + seconds
        self._counted = done

    def _wait_for_begun(
        self, background: Compilers, keys: Sequence[Key], report: Callable[[int], None]
    ) -> Sequence[Key]:
        """Waits while children compile some of the keys. Returns the keys they have not begun or failed at."""
        wanted = {job for job, key in enumerate(background.keys) if key in keys}
        while wanted & background.under_way():
            report(len(wanted & background.done()))
            time.sleep(POLL_S)
        done = {background.keys[job] for job in background.done()}
        return [key for key in keys if key not in done]

    def _end_background(self) -> list[Key]:
        """Ends the children. Returns their unfinished programs."""
        compilers, self._background = self._background, None
        if compilers is None:
            return []
        with compilers:
            self.compiled += len(compilers.done()) - self._counted
            ended = compilers.ended()
            return [key for job, key in enumerate(compilers.keys) if job not in ended and key not in self._programs]

    @property
    def compiles_later(self) -> bool:
        """Whether children are compiling programs that nobody waits for. They end with this process or `close`."""
        return self._background is not None and self._background.is_running

    def close(self) -> None:
        """Ends the children."""
        self._end_background()

    def store(self, key: Key) -> bool:
        """Compiles a program into the disk cache, for another process. Returns False if it cannot be kept there."""
        self._compile(key)
        path = self._found(*key)[2]
        # A GPU driver compiles the cached binary to machine code, and caches the result itself.
        return path.exists() and (self._is_cpu or self._from_disk(path, key[1]) is not None)

    def _found(self, file: str, defines: str, prelude: str) -> tuple[str, str, Path]:
        """Returns a program's source text, build options and cache file."""
        source = prelude + read_source(file)
        options = " ".join((*BUILD_OPTIONS, defines))
        key = hashlib.sha256("\0".join((self._identity, options, source)).encode()).hexdigest()[:32]
        return source, options, cache_dir() / "programs" / f"{Path(file).stem}-{key}.bin"

    def _from_disk(self, path: Path, options: str) -> cl.Program | None:
        stored = read_cached(path)
        if stored is None:
            return None
        digest, binary = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
        if digest != _digest(path, binary):  # damaged or foreign; such a binary may crash a driver
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = cl.Program(self._context, [self._device], [binary])
                # NVIDIA's driver compiles to machine code now, and has lost the register limit.
                program.build(options=[option for option in options.split() if option.startswith(REGISTER_LIMIT)])
                _log.info("loaded %s for %s from %s", path.stem.rpartition("-")[0], self._device.name.strip(), path)
                return program
        except cl.Error:
            return None  # compiled again, which replaces the file

    def _compile(self, key: Key) -> cl.Program:
        file, (source, options, path) = key[0], self._found(*key)
        if self.on_compile is not None:
            self.on_compile()
        start = time.perf_counter()
        try:
            program, binary = self._build(cl.Program(self._context, source), options)
            if needs_splice(source):
                binary = splice(binary.decode(errors="replace")).encode()
                program, _ = self._build(cl.Program(self._context, [self._device], [binary]), "")
        except (cl.Error, ValueError) as error:
            raise KernelBuildError(
                f"kernel {file} does not compile on {self._device.name.strip()} with options {options!r}; "
                f"please report this with the compiler's log:\n{error}"
            ) from error
        seconds = time.perf_counter() - start
        _log.info("compiled %s for %s in %.1f s", Path(file).stem, self._device.name.strip(), seconds)
        self.compile_s += seconds
        self.compiled += 1
        if not self.keeps_binaries:
            return program
        try:
            write_cached(path, _digest(path, binary) + binary)
        except OSError as error:  # costs compile time, not the run
            if self.compiled == 1 and not isinstance(error, UnusableError):  # a warning has named the path
                _log.warning(
                    "compiled kernels cannot be kept in %s (%s), so each start compiles them anew; make the folder "
                    "writable or set LLMCL_CACHE_DIR",
                    path.parent,
                    error.strerror,
                )
        return program

    def _build(self, program: cl.Program, options: str) -> tuple[cl.Program, bytes]:
        """Builds the program. Returns it with its binary (empty if binaries are not kept)."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # False: disables pyopencl's own cache.
            program.build(options=options.split(), cache_dir=False)  # type: ignore[arg-type]
        if not self.keeps_binaries:
            return program, b""
        binaries: list[bytes] = program.get_info(cl.program_info.BINARIES)  # type: ignore[assignment]
        return program, binaries[0]


def _digest(path: Path, binary: bytes) -> bytes:
    """Hashes the binary with its file name, which stands for source and options. A renamed file is rejected."""
    return hashlib.blake2b(path.stem.encode() + b"\0" + binary, digest_size=DIGEST_BYTES).digest()


def can_keep() -> bool:
    """Returns whether programs can be written to the cache folder."""
    folder = cache_dir() / "programs"
    try:
        make_folder(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def constant_text(value: object) -> str:
    """Formats a build constant's value as OpenCL C."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return f"{value!r}f" if "e" in repr(value) or "." in repr(value) else f"{value!r}.0f"
    return str(value)

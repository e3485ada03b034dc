"""The process that renders chat templates: one for all models in a program, started early and kept.

A template is a program from a checkpoint. Nothing inside a process can bound a single operation, such as a filter over
a long range or a doubled string. So the template runs in a process limited to MEMORY_LIMIT bytes, if the system can
limit address space (Linux and other Unix, not macOS or Windows). The process is killed after TIME_LIMIT_S. It returns a
text of at most TEXT_LIMIT bytes, never an object. After a process has ended, the next request starts a new one.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from llmcl.errors import LlmclError
from llmcl.runtime.child_process import interpreter

TIME_LIMIT_S = 5.0
START_LIMIT_S = 60.0  # generous, for a busy machine
MEMORY_LIMIT = 512 << 20  # Python and Jinja use 25 MiB
TEXT_LIMIT = 1 << 26  # far more than any context holds

# The folders follow the standard library, so their modules cannot shadow standard modules.
_PROGRAM = """
import sys
sys.path.extend(sys.argv[3:])
from template_sandbox import serve
serve(int(sys.argv[1]), float(sys.argv[2]))
"""
# The whole environment of the process: no keys, no tokens. The time zone is for strftime_now.
_ENVIRONMENT = ("TZ", "TZDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")


class LimitError(Exception):
    """A template exceeded its time or memory, wrote too much, or ended its process."""


class _EndedError(LimitError):
    """The process ended, perhaps because of earlier requests."""


class _Process:
    """A started process; handles one request at a time."""

    def __init__(self) -> None:
        """Returns at once, while the process is still importing. Raises LlmclError if no process can be started."""
        folders = [os.path.dirname(os.path.abspath(__file__))]
        for name in ("markupsafe", "jinja2"):
            package = importlib.util.find_spec(name)  # imports nothing
            if package is None or package.origin is None:
                raise _cannot_start(f"the package {name} is not installed")
            folders.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(package.origin))))
        options = ["-I", "-S", *(["-B"] if sys.dont_write_bytecode else [])]  # -I ignores the environment
        limits = str(MEMORY_LIMIT), str(2 * TIME_LIMIT_S)
        try:
            self._process = subprocess.Popen(
                [interpreter(), *options, "-c", _PROGRAM, *limits, *folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError as error:
            raise _cannot_start(str(error)) from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._starts = True
        self._watch = _Watch(self._process.kill)

    def ask(self, request: bytes) -> tuple[str, str]:
        """Returns an answer's letter and text. After any error the process is unusable."""
        if self._starts:
            with self._watch.limit(START_LIMIT_S):
                if self._answers.read(1) != b"+":
                    raise _cannot_start(f"no answer in {START_LIMIT_S:g} s" if self._watch.is_late else self._reason())
            self._starts = False
        with self._watch.limit(TIME_LIMIT_S):
            with suppress(OSError):  # it may have answered before it ended
                self._requests.write(len(request).to_bytes(8, "big"))
                self._requests.write(request)
                self._requests.flush()
            kind, size = self._read(1), int.from_bytes(self._read(8), "big")
            if size > TEXT_LIMIT:
                raise LimitError(f"its text has more than {TEXT_LIMIT} bytes")
            data = self._read(size)
        if kind == b"M":
            raise _EndedError(f"it needs more than {MEMORY_LIMIT >> 20} MiB of memory")
        try:
            return kind.decode("ascii"), data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise _EndedError("its process sent no text") from None

    @property
    def is_alive(self) -> bool:
        """Whether the process takes more requests; False if the limit passed during the last answer."""
        return not self._watch.is_late

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self.close()

    def close(self) -> None:
        """Closes this side of the pipes, so an idle process ends."""
        self._watch.end()
        for pipe in (self._requests, self._answers):
            with suppress(OSError):
                pipe.close()

    def leave_to_parent(self) -> None:
        """Releases the process in a forked copy of this program: it belongs to the original."""
        self._process.returncode = 0
        self._watch = _Watch(lambda: None)  # a thread missing in this copy may have held the old lock
        self.close()

    def _read(self, size: int) -> bytes:
        data = self._answers.read(size)
        if len(data) < size:
            reason = self._reason()
            if self._watch.is_late:
                raise LimitError(f"it ran for more than {TIME_LIMIT_S:g} s")
            raise _EndedError(reason)
        return data

    def _reason(self) -> str:
        """Waits for the process to end. Returns the reason."""
        code = self._process.wait()
        return f"its process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"


class _Watch:
    """Calls `late` once, in a thread, when a limit expires. Handles one limit at a time.

    The thread is kept, since starting a thread per request takes as long as rendering a short conversation. It sleeps
    until the known limit and is woken only for an earlier limit.
    """

    def __init__(self, late: Callable[[], None]):
        self._late = late
        self.is_late = self._is_over = False
        self._until: float | None = None
        self._wakes: float | None = None  # None: the thread sleeps until notified, or was not started
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        with self._changed:
            self._until = time.monotonic() + seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="limit of a chat template", daemon=True)
                self._thread.start()
            elif self._wakes is None or self._until < self._wakes:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._until = None

    def end(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def _work(self) -> None:
        with self._changed:
            while not self._is_over:
                left = None if self._until is None else self._until - time.monotonic()
                if left is not None and left <= 0:
                    self.is_late = True
                    self._late()
                    return
                self._wakes = self._until
                self._changed.wait(left)


_lock = threading.Lock()
_idle: _Process | None = None


def start() -> None:
    """Starts the process without waiting, so it is ready for the first request."""
    global _idle
    if _lock.acquire(blocking=False):  # otherwise a process is already at work
        try:
            if _idle is None:
                with suppress(LlmclError):  # the first request reports the error
                    _idle = _Process()
        finally:
            _lock.release()


def ask(request: bytes) -> tuple[str, str]:
    """Returns the letter and text of template_sandbox.py's answer to a request. Threads take turns.

    Raises:
        LimitError: the template exceeded a limit.
        LlmclError: no process can be started here.
    """
    global _idle
    with _lock:
        while True:
            is_new = _idle is None
            process, _idle = _idle or _Process(), None
            try:
                answer = process.ask(request)
                _idle = process if process.is_alive else None
                return answer
            except (_EndedError, LlmclError):
                if is_new:
                    raise
            finally:
                if _idle is not process:  # also after Ctrl-C: the next request would get this answer
                    process.stop()


def stop() -> None:
    """Ends the idle process; the next request starts another."""
    global _idle
    process, _idle = _idle, None
    if process is not None:
        process.stop()


def _cannot_start(reason: str) -> LlmclError:
    return LlmclError.with_remedy(
        f"Chat templates are rendered in a process of their own, which cannot be started: {reason}.",
        "Give the prompt as it is, without the template (raw, --raw).",
    )


def _after_fork() -> None:
    global _lock, _idle
    _lock = threading.Lock()
    process, _idle = _idle, None
    if process is not None:
        process.leave_to_parent()


atexit.register(stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

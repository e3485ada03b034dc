"""The process in which chat templates are rendered: one for all models of a program, started early and kept.

A template is a program from a checkpoint. Nothing inside a process bounds what one operation of it takes, such as a
filter over a long range or a doubled string. So it runs in a process that may take MEMORY_LIMIT bytes, where the system
can limit an address space (Linux and other Unix, but not macOS and not Windows). After TIME_LIMIT_S it is ended. A text
of at most TEXT_LIMIT bytes comes back, and never an object. Where a process ended, the next request gets a new one.
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
START_LIMIT_S = 60.0  # for a machine with much else to do
MEMORY_LIMIT = 512 << 20  # of which Python and Jinja take 25
TEXT_LIMIT = 1 << 26  # far more than any context takes

# The folders stand behind the standard library, so that no module in them takes the place of one of its own.
_PROGRAM = """
import sys
sys.path.extend(sys.argv[3:])
from template_sandbox import serve
serve(int(sys.argv[1]), float(sys.argv[2]))
"""
# All that the process gets of the environment: no keys, no tokens. The time zone is for strftime_now.
_ENVIRONMENT = ("TZ", "TZDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")


class LimitError(Exception):
    """A template took more time or memory than one may, wrote too much, or ended its process."""


class _EndedError(LimitError):
    """The process ended, perhaps because of what it had done before."""


class _Process:
    """A started process; one request at a time."""

    def __init__(self) -> None:
        """Returns at once, while the process still imports. Raises LlmclError if there can be none."""
        folders = [os.path.dirname(os.path.abspath(__file__))]
        for name in ("markupsafe", "jinja2"):
            package = importlib.util.find_spec(name)  # which imports nothing
            if package is None or package.origin is None:
                raise _cannot_start(f"the package {name} is not installed")
            folders.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(package.origin))))
        options = ["-I", "-S", *(["-B"] if sys.dont_write_bytecode else [])]  # -I leaves the environment out
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
        """The letter and the text of an answer. After an error of any kind the process is no longer usable."""
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
        """Whether it takes further requests: else the limit passed while the last answer came."""
        return not self._watch.is_late

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self.close()

    def close(self) -> None:
        """Closes this side of the pipes: an idle process ends."""
        self._watch.end()
        for pipe in (self._requests, self._answers):
            with suppress(OSError):
                pipe.close()

    def leave_to_parent(self) -> None:
        """For a copy of this program that `fork` made: the process belongs to the original."""
        self._process.returncode = 0
        self._watch = _Watch(lambda: None)  # a thread that is not here may have held the other's lock
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
        """Why the process ended, once it did."""
        code = self._process.wait()
        return f"its process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"


class _Watch:
    """Calls `late` once, in a thread, when what it limits takes longer than it may. One limit at a time.

    The thread is kept: to start one for each request takes as long as to render a short conversation. It sleeps until
    the limit that it knows, and is woken for an earlier one alone.
    """

    def __init__(self, late: Callable[[], None]):
        self._late = late
        self.is_late = self._is_over = False
        self._until: float | None = None
        self._wakes: float | None = None  # None: the thread sleeps until it is woken, or was not started
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
    """Starts the process without waiting for it, so that it is there when the first request comes."""
    global _idle
    if _lock.acquire(blocking=False):  # else there is one at work
        try:
            if _idle is None:
                with suppress(LlmclError):  # the first request says it
                    _idle = _Process()
        finally:
            _lock.release()


def ask(request: bytes) -> tuple[str, str]:
    """The letter and the text with which template_sandbox.py answers a request. Threads take turns.

    Raises:
        LimitError: the template went beyond a limit.
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
                if _idle is not process:  # also after Ctrl-C: its answer would be taken for the next one's
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

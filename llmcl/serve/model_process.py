"""A model's server in a process: started, watched and stopped by a router.

Both sides write lines of JSON. The router writes what to serve and the API key to the process's standard input, later
"go". The process writes its port, the memory that it needs (then it waits for "go"), and that it is ready. When the
standard input ends, the process ends: at the router's wish, and also when the router has died.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Thread
from typing import Any

KILL_S = 10.0  # how long a process may take to end, beside its answers
_SHOWN_BYTES = 1 << 16  # longest line of a process's log


class ModelProcess:
    """The router's side. Use within one event loop.

    command: starts the process. spec: what the process serves, for `ParentLine.spec`. log: takes the lines that the
    process writes to standard error; called in a thread.
    """

    def __init__(self, command: Sequence[str], spec: dict[str, Any], log: Callable[[str], None]):
        self.key = secrets.token_urlsafe(32)
        self.port = 0
        self.last_line = ""  # of the log, or its error: the reason, if the process fails
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()  # None: the process has ended
        self.ended = asyncio.Event()
        self._loop, self._log = asyncio.get_running_loop(), log
        # In a session of its own: Ctrl-C reaches the router only, which lets answers end before it stops the process.
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        self._logging = Thread(target=self._read_log, name="log of a model", daemon=True)
        self._logging.start()
        Thread(target=self._read_events, name="events of a model", daemon=True).start()
        self.tell({**spec, "key": self.key})

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        code: int | None = self._process.returncode
        return code

    def tell(self, message: Any) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # the process has ended, or was told to
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Asks the process to end."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        self._process.kill()

    async def stop(self, limit_s: float) -> None:
        """Ends the process: asks, and kills after limit_s."""
        self.close()
        try:
            await asyncio.wait_for(self.ended.wait(), limit_s)
        except asyncio.TimeoutError:
            self.kill()
            await self.ended.wait()

    def wait(self, end: float) -> None:
        """Waits without an event loop until `time.monotonic()` is `end`, and kills a process that still runs."""
        try:
            self._process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        with open(self._process.stderr.fileno(), "rb", closefd=False) as lines:
            while line := lines.readline(_SHOWN_BYTES):
                if text := line.decode(errors="replace").rstrip():
                    if text.startswith("error: ") or not self.last_line.startswith("error: "):
                        self.last_line = text
                    self._log(text)

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        with suppress(RuntimeError):  # the event loop has ended
            with open(self._process.stdout.fileno(), "rb", closefd=False) as lines:
                for line in lines:
                    if line.endswith(b"\n"):  # otherwise the process died while writing
                        self._loop.call_soon_threadsafe(self.events.put_nowait, json.loads(line))
            self._process.wait()
            self._logging.join(1)  # a process that a driver left running may hold the pipe
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self.ended.set()
        self.events.put_nowait(None)


class ParentLine:
    """The process's side: reads `spec`, then watches standard input. Takes over standard output: what other code prints
    there goes to standard error.
    """

    def __init__(self) -> None:
        self._events = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        # Not `sys.stdin`: a thread that waits there would disturb the end of the interpreter.
        self._lines = os.fdopen(os.dup(0), "rb", closefd=False)
        self.spec: dict[str, Any] = json.loads(self._lines.readline())
        self._may_go = Event()

    def watch(self, limit_s: float) -> None:
        """Starts to watch. When standard input ends, this process gets SIGTERM, and is killed after limit_s."""
        Thread(target=self._watch, args=(limit_s,), name="parent", daemon=True).start()

    def tell(self, **event: Any) -> None:
        with suppress(OSError):  # the router has died
            print(json.dumps(event), file=self._events, flush=True)

    def wait_for_go(self) -> None:
        self._may_go.wait()

    def _watch(self, limit_s: float) -> None:
        while self._lines.readline():
            self._may_go.set()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(limit_s)
        print("error: killed, because answers did not end in time", file=sys.stderr, flush=True)
        os._exit(1)

"""The server's state: loading, ready or stopping, and the work under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from llmcl.errors import counted
from llmcl.serve.errors import RequestError
from llmcl.serve.events import ClientGoneError, unless_gone
from llmcl.serve.kept import Kept
from llmcl.serve.metrics import Metrics
from llmcl.serve.served import Served
from llmcl.serve.settings import Settings
from llmcl.serve.state_dir import StateDir

_ARRIVAL = "llmcl.arrival"

T = TypeVar("T")


class Service:
    """State shared by all requests. The loading thread may call `progress`, `ready` and `fail`."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.metrics = Metrics(lambda: None if self._served is None else self._served.engine.metrics, self._places)
        self.failure: BaseException | None = None
        self.stopping = False
        self.kept = Kept(storage=None if settings.state_dir is None else StateDir(settings.state_dir))
        self.in_flight = 0  # sequences, running or waiting
        self.counts = 0  # requests whose tokens are being counted or wait for counting
        self._served: Served | None = None
        self._doing = "starting", 0, 0

    def progress(self, what: str, done: int, total: int) -> None:
        """See llmcl/progress.py."""
        self._doing = what, done, total

    def ready(self, served: Served) -> None:
        self._served = served

    def fail(self, error: BaseException) -> None:
        """Records a loading error; the server then ends."""
        self.failure = error

    def stop(self) -> None:
        """Stops accepting new work."""
        self.stopping = True

    @property
    def loaded(self) -> Served | None:
        return self._served

    def health(self) -> tuple[int, dict[str, object]]:
        """Returns the HTTP status and the server's activity."""
        if self.stopping:
            return 503, {"status": "stopping", "in_flight": self.in_flight}
        if self._served is None:
            what, done, total = self._doing
            return 503, {"status": "loading", "doing": what, "done": done, "total": total}
        return 200, {"status": "ok"}

    def served(self) -> Served:
        """Returns the model. Raises RequestError while loading or stopping."""
        if self.stopping:
            raise RequestError(503, "the server is stopping", code="unavailable", retry_after_s=5)
        if self._served is None:
            what = self._doing[0]
            raise RequestError(503, f"the model is not ready yet: {what}", code="unavailable", retry_after_s=1)
        return self._served

    def expect(self, scope: Scope) -> None:
        """Announces a request that will run the engine unless refused; see `Engine.expect`."""
        if self._served is not None and not self.stopping:
            scope[_ARRIVAL] = self._served.engine.expect()

    @contextmanager
    def admit(self, n_sequences: int) -> Iterator[None]:
        """Reserves slots for sequences, running or waiting. Raises RequestError if there is no room."""
        self.served()
        most = self.settings.max_in_flight
        if n_sequences > most:
            raise RequestError(
                400,
                f"n: {n_sequences} answers are asked for, more than the {most} that may be under way",
                "n",
            )
        if self.in_flight + n_sequences > most:
            message = f"all places and the queue are taken ({counted(most, 'answer')}); try again later"
            raise RequestError(429, message, code="queue_full", retry_after_s=1)
        self.in_flight += n_sequences
        try:
            yield
        finally:
            self.in_flight -= n_sequences

    async def count(
        self, request: Request, work: Coroutine[Any, Any, T], what: str = "tokens", done: str = "counted"
    ) -> T:
        """Awaits work that no slot limits, such as counting tokens. The work ends when the client leaves.

        what, done: for messages. Raises RequestError if max_queue requests already wait for such work, or after
        count_s.
        """
        if self.counts > self.settings.max_queue:
            work.close()
            message = f"too many requests wait for their {what} to be {done}; try again later"
            raise RequestError(429, message, code="queue_full", retry_after_s=1)
        self.counts += 1
        try:
            with anyio.fail_after(self.settings.count_s):
                return await unless_gone(request.receive, work)
        except ClientGoneError:
            raise ClientDisconnect from None
        except TimeoutError:
            message = f"the {what} were not {done} within {self.settings.count_s:g} s; try again later"
            raise RequestError(503, message, code="unavailable", retry_after_s=1) from None
        finally:
            self.counts -= 1

    def _places(self) -> tuple[int, int]:
        """Returns how many sequences are running and how many wait."""
        running = min(self.in_flight, self.settings.max_sequences)
        return running, self.in_flight - running


def arrived(scope: Scope) -> None:
    """Tells the engine that an announced request has arrived, or never will. Later calls do nothing.

    The call is delayed until the event loop has polled for data once more. Requests that arrived meanwhile are thereby
    announced first, so the engine keeps waiting as long as each poll brings another request.
    """
    come: Callable[[], None] | None = scope.pop(_ARRIVAL, None)
    if come is not None:
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, come)

"""The state of a server: loading, ready or stopping, and what is under way."""

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

_ARRIVAL = "llmcl.arrival"

T = TypeVar("T")


class Service:
    """What all requests share. `progress`, `ready` and `fail` may be called from the thread that loads the model."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.metrics = Metrics(lambda: None if self._served is None else self._served.engine.metrics, self._places)
        self.failure: BaseException | None = None
        self.stopping = False
        self.kept = Kept()
        self.in_flight = 0  # sequences, running or waiting
        self.counts = 0  # requests whose tokens are counted, or wait for it
        self._served: Served | None = None
        self._doing = "starting", 0, 0

    def progress(self, what: str, done: int, total: int) -> None:
        """See llmcl/progress.py."""
        self._doing = what, done, total

    def ready(self, served: Served) -> None:
        self._served = served

    def fail(self, error: BaseException) -> None:
        """The model cannot be loaded, so the server ends."""
        self.failure = error

    def stop(self) -> None:
        """From now on nothing new is taken on."""
        self.stopping = True

    @property
    def loaded(self) -> Served | None:
        return self._served

    def health(self) -> tuple[int, dict[str, object]]:
        """HTTP status and what the server is doing."""
        if self.stopping:
            return 503, {"status": "stopping", "in_flight": self.in_flight}
        if self._served is None:
            what, done, total = self._doing
            return 503, {"status": "loading", "doing": what, "done": done, "total": total}
        return 200, {"status": "ok"}

    def served(self) -> Served:
        """The model. Raises RequestError while it loads, or when the server stops."""
        if self.stopping:
            raise RequestError(503, "the server is stopping", code="unavailable", retry_after_s=5)
        if self._served is None:
            what = self._doing[0]
            raise RequestError(503, f"the model is not ready yet: {what}", code="unavailable", retry_after_s=1)
        return self._served

    def expect(self, scope: Scope) -> None:
        """The request is there, and will have the engine make answers unless it is refused: see `Engine.expect`."""
        if self._served is not None and not self.stopping:
            scope[_ARRIVAL] = self._served.engine.expect()

    @contextmanager
    def admit(self, n_sequences: int) -> Iterator[None]:
        """Room for so many sequences, running or waiting. Raises RequestError where there is none."""
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

    async def count(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Awaits work on the tokens of a request that wants no answer. The work ends when the client leaves.

        Raises RequestError where max_queue requests wait for such work, or where it takes longer than count_s.
        """
        if self.counts > self.settings.max_queue:
            work.close()
            raise RequestError(
                429, "too many texts wait to be counted; try again later", code="queue_full", retry_after_s=1
            )
        self.counts += 1
        try:
            with anyio.fail_after(self.settings.count_s):
                return await unless_gone(request.receive, work)
        except ClientGoneError:
            raise ClientDisconnect from None
        except TimeoutError:
            message = f"the tokens were not counted within {self.settings.count_s:g} s; try again later"
            raise RequestError(503, message, code="unavailable", retry_after_s=1) from None
        finally:
            self.counts -= 1

    def _places(self) -> tuple[int, int]:
        """Sequences that are answered, and those that wait."""
        running = min(self.in_flight, self.settings.max_sequences)
        return running, self.in_flight - running


def arrived(scope: Scope) -> None:
    """The engine has the request, or never will have it. Calls after the first do nothing.

    The engine is told after the event loop has looked for data once more: what came meanwhile of other requests makes
    these expected first. So the engine waits as long as one look finds another.
    """
    come: Callable[[], None] | None = scope.pop(_ARRIVAL, None)
    if come is not None:
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, come)

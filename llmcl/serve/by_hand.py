"""Runs a coroutine up to its first wait, without a task."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Begun(Awaitable[T], Generic[T]):
    """A coroutine already run up to its first wait. Await the object for the rest, in an event loop.

    Most reads and writes of a server find the data, or the buffer space, and never wait. A task and a timeout would
    cost more than the operation, so neither is created. `is_over` means that the coroutine has returned; `result` is
    then the value. Raises whatever the coroutine raises.
    """

    result: T

    def __init__(self, coroutine: Coroutine[Any, Any, T]):
        self._coroutine = coroutine
        self.is_over = False
        self._waits_for: Any = None
        try:
            self._waits_for = coroutine.send(None)
        except StopIteration as end:
            self._end(end)

    def __await__(self) -> Generator[Any, Any, T]:
        while not self.is_over:
            try:
                try:
                    sent = yield self._waits_for
                except BaseException as error:
                    self._waits_for = self._coroutine.throw(error)
                else:
                    self._waits_for = self._coroutine.send(sent)
            except StopIteration as end:
                self._end(end)
        return self.result

    def _end(self, end: StopIteration) -> None:
        self.is_over, self.result = True, end.value

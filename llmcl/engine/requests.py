"""What a caller holds of a request to an engine: its pieces, for a thread or for a task, and a way to cancel it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import ClassVar
from weakref import WeakKeyDictionary, ref

from llmcl.engine.generation import Generation, Piece, collect
from llmcl.engine.worker import End


class Request(Iterator[Piece], AsyncIterator[Piece]):
    """An answer on its way. Iterate over it, with `for` in a thread or with `async for`, or take the whole `result`.

    It goes on whether or not somebody reads; it ends when it is cancelled, or when nothing refers to it any more.

    prompt_token_ids: what was asked.
    """

    def __init__(self, prompt_token_ids: list[int], mailbox: Mailbox, cancel: Callable[[], None]):
        self.prompt_token_ids = prompt_token_ids
        self._mailbox = mailbox
        self._cancel = cancel
        self._over = False

    def cancel(self) -> None:
        """Ends the answer: pages and place are free before the next step. No piece comes any more."""
        self._over = True
        self._cancel()

    def result(self) -> Generation:
        """Waits for the whole answer; for who has read no piece."""
        return collect(self.prompt_token_ids, self)

    def __next__(self) -> Piece:
        if self._over:
            raise StopIteration
        piece = self._checked(self._mailbox.items.get())
        if piece is None:
            raise StopIteration
        return piece

    async def __anext__(self) -> Piece:
        if self._over:
            raise StopAsyncIteration
        try:
            piece = self._checked(await self._mailbox.take())
        except asyncio.CancelledError:
            self.cancel()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def _checked(self, item: Piece | End) -> Piece | None:
        if isinstance(item, Piece):
            return item
        self._over = True
        if item is not None:
            raise type(item)(str(item)) from item  # one error may have many readers
        return None

    def __del__(self) -> None:
        with suppress(AttributeError):  # interrupted in __init__
            self._cancel()


class Mailbox:
    """What the worker gives, until it is taken. The worker refers to this, and never to the request."""

    def __init__(self) -> None:
        self.items: SimpleQueue[Piece | End] = SimpleQueue()
        self._event: asyncio.Event | None = None  # of a task that waits, in the loop of `_waker`
        self._waker: Waker | None = None

    def give(self, item: Piece | End) -> None:
        self.items.put(item)

    def wake(self) -> None:
        """After one or several `give`: for a task that waits."""
        if self._waker is not None and self._event is not None:
            self._waker.wake(self._event)

    async def take(self) -> Piece | End:
        event, waker = self._event, Waker.of(asyncio.get_running_loop())
        if event is None or waker is not self._waker:
            self._event = event = asyncio.Event()
            self._waker = waker
        while True:
            event.clear()
            try:
                return self.items.get_nowait()
            except Empty:
                await event.wait()


class Waker:
    """Wakes tasks of an event loop from another thread. Those that are woken together cost one call into the loop,
    which is a write to a pipe, and lets go of the interpreter.
    """

    _of: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, Waker]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = ref(loop)
        self._events: deque[asyncio.Event] = deque()
        self._is_called = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Waker:
        """That of a loop, asked for in its own thread."""
        if (waker := cls._of.get(loop)) is None:
            waker = cls._of[loop] = cls(loop)
        return waker

    def wake(self, event: asyncio.Event) -> None:
        self._events.append(event)
        loop = self._loop()
        if not self._is_called and loop is not None:
            self._is_called = True  # before the call, which may run at once
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        self._is_called = False  # what is appended from now on is set here or has a call of its own
        while self._events:
            self._events.popleft().set()


class PieceStream(AsyncIterator[Piece]):
    """The pieces of a request, or of one that is made when the first of them is asked for. That happens in a thread,
    since a chat template or a grammar may take its time.
    """

    def __init__(self, request: Request | Callable[[], Request]):
        self._submit = request
        self._request = request if isinstance(request, Request) else None

    async def __anext__(self) -> Piece:
        if self._request is None:
            assert not isinstance(self._submit, Request)
            self._request = await asyncio.to_thread(self._submit)
        return await self._request.__anext__()

    async def aclose(self) -> None:
        """Cancels the request; so does leaving the loop and dropping the stream."""
        if self._request is not None:
            self._request.cancel()

"""What a caller holds of a request to an engine: its pieces, for a thread or for a task, and a way to cancel it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue

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
        self._wake: Callable[[], object] = lambda: None

    def give(self, item: Piece | End) -> None:
        self.items.put(item)
        with suppress(RuntimeError):  # the event loop is closed
            self._wake()

    async def take(self) -> Piece | End:
        event, loop = asyncio.Event(), asyncio.get_running_loop()
        self._wake = lambda: loop.call_soon_threadsafe(event.set)
        while True:
            event.clear()
            try:
                return self.items.get_nowait()
            except Empty:
                await event.wait()


class PieceStream(AsyncIterator[Piece]):
    """The pieces of a request that is made when the first of them is asked for."""

    def __init__(self, submit: Callable[[], Request]):
        self._submit = submit
        self._request: Request | None = None

    async def __anext__(self) -> Piece:
        if self._request is None:
            self._request = await asyncio.to_thread(self._submit)  # a chat template may take its time
        return await self._request.__anext__()

    async def aclose(self) -> None:
        """Cancels the request; so does leaving the loop and dropping the stream."""
        if self._request is not None:
            self._request.cancel()

"""A request to an engine as the caller sees it: read the pieces in a thread or in an asyncio task, or cancel."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import ClassVar
from weakref import WeakKeyDictionary, ref

from llmcl.engine.generation import Generation, Piece, collect
from llmcl.engine.worker import End, nothing
from llmcl.errors import UsageError


class Request(Iterator[Piece], AsyncIterator[Piece]):
    """A running answer. Iterate over the pieces, with `for` in a thread or with `async for`, or take the `result`.

    The answer goes on even if nobody reads. It ends when cancelled, or when nothing refers to the request any more.

    prompt_token_ids: the prompt. progress: returns how many prompt tokens the prefix cache held, and how many were
    read.
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        mailbox: Mailbox,
        cancel: Callable[[], None],
        progress: Callable[[], tuple[int, int]],
    ):
        self.progress = progress
        self.prompt_token_ids = prompt_token_ids
        self._mailbox = mailbox
        self._cancel = cancel
        self._over = False
        self._is_read = False
        self._result: Generation | None = None

    def cancel(self) -> None:
        """Ends the answer: KV cache pages and slot are free before the next step. No further piece comes."""
        self._over = True
        self._cancel()

    def result(self) -> Generation:
        """Waits for the whole answer. Raises UsageError if a piece was read before: the result would lack it."""
        if self._result is None:
            if self._is_read:
                raise UsageError(
                    "pieces of the answer were read already, and its result would lack them; read either the pieces or "
                    "the result"
                )
            self._result = collect(self.prompt_token_ids, self)
        return self._result

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

    async def pass_on(self, take: Callable[[Piece], None], after: Callable[[], None] = nothing) -> None:
        """Calls `take` with each arriving piece, in the running event loop; returns at the end of the answer.

        Faster than `async for`: no task is woken for a piece. after: called after a piece, or once after several
        pieces if they came while the loop was busy. Raises the error of the answer. An error in `take` or `after` is
        raised, too, and cancels the request.
        """
        if self._over:
            return
        self._is_read = True
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def give(items: list[Piece | End]) -> None:
            if done.done():
                return
            try:
                for item in items:
                    if isinstance(item, Piece) and not self._over:
                        take(item)
                after()
                if not isinstance(items[-1], Piece):
                    self._checked(items[-1])
                    done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        self._mailbox.pass_on(give)
        try:
            await done
        finally:
            if not self._over:
                self.cancel()

    def _checked(self, item: Piece | End) -> Piece | None:
        if isinstance(item, Piece):
            self._is_read = True
            return item
        self._over = True
        self._mailbox.give(item)  # further readers may wait for the end
        self._mailbox.wake()
        if item is not None:
            raise type(item)(str(item)) from item  # the same error may have many readers
        return None

    def __del__(self) -> None:
        with suppress(AttributeError):  # interrupted in __init__
            self._cancel()


class Mailbox:
    """Holds pieces from the worker until they are read. The worker refers to the mailbox, never to the request."""

    def __init__(self) -> None:
        self.items: SimpleQueue[Piece | End] = SimpleQueue()
        self._event: asyncio.Event | None = None  # a waiting task's event, in the loop of `_waker`
        self._waker: Waker | None = None
        self._woken: Callable[[], None] | None = None

    def give(self, item: Piece | End) -> None:
        self.items.put(item)

    def wake(self) -> None:
        """Wakes the reader in an event loop, after one or several calls of `give`."""
        if self._waker is not None and self._woken is not None:
            self._waker.wake(self._woken)

    async def take(self) -> Piece | End:
        event, waker = self._event, Waker.of(asyncio.get_running_loop())
        if event is None or waker is not self._waker:
            self._event = event = asyncio.Event()
            self._waker, self._woken = waker, event.set
        while True:
            event.clear()
            try:
                return self.items.get_nowait()
            except Empty:
                await event.wait()

    def pass_on(self, take: Callable[[list[Piece | End]], None]) -> None:
        """Lets the running event loop call `take` with all arriving items; items already there are passed at once."""

        def woken() -> None:
            there: list[Piece | End] = []
            with suppress(Empty):
                while True:
                    there.append(self.items.get_nowait())
            if there:
                take(there)

        self._event, self._waker, self._woken = None, Waker.of(asyncio.get_running_loop()), woken
        woken()


class Waker:
    """Calls functions in an event loop from another thread. Functions called together cost a single call into the loop,
    because each call into the loop writes to a pipe and releases the interpreter lock.
    """

    _of: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, Waker]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = ref(loop)
        self._woken: deque[Callable[[], None]] = deque()
        self._is_called = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Waker:
        """Returns the waker for an event loop. Call it in the loop's thread."""
        if (waker := cls._of.get(loop)) is None:
            waker = cls._of[loop] = cls(loop)
        return waker

    def wake(self, woken: Callable[[], None]) -> None:
        self._woken.append(woken)
        loop = self._loop()
        if not self._is_called and loop is not None:
            self._is_called = True  # before the call, which may run at once
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._call)

    def _call(self) -> None:
        self._is_called = False  # functions appended from now on run here or get a new call
        while self._woken:
            self._woken.popleft()()


class PieceStream(AsyncIterator[Piece]):
    """The pieces of a request. The request may also be submitted when the first piece is read. A thread then submits
    the request, since a chat template or a grammar may be slow.
    """

    def __init__(self, request: Request | Callable[[], Request]):
        self._submit = request
        self._request = request if isinstance(request, Request) else None

    async def __anext__(self) -> Piece:
        return await (self._request or await self._begun()).__anext__()

    async def pass_on(self, take: Callable[[Piece], None], after: Callable[[], None] = nothing) -> None:
        """Does the same as `Request.pass_on`."""
        await (self._request or await self._begun()).pass_on(take, after)

    async def _begun(self) -> Request:
        assert not isinstance(self._submit, Request)
        self._request = await asyncio.to_thread(self._submit)
        return self._request

    def progress(self) -> tuple[int, int]:
        """Returns the same as `Request.progress`; (0, 0) before the request is submitted."""
        return (0, 0) if self._request is None else self._request.progress()

    async def aclose(self) -> None:
        """Cancels the request. Leaving the loop or dropping the stream does the same."""
        if self._request is not None:
            self._request.cancel()

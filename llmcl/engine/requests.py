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
from llmcl.engine.worker import End, nothing
from llmcl.errors import UsageError


class Request(Iterator[Piece], AsyncIterator[Piece]):
    """An answer on its way. Iterate over it, with `for` in a thread or with `async for`, or take the whole `result`.

    It goes on whether or not somebody reads; it ends when it is cancelled, or when nothing refers to it any more.

    prompt_token_ids: what was asked. progress: says how many of these the prefix cache held, and how many were read.
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
        """Ends the answer: pages and place are free before the next step. No piece comes any more."""
        self._over = True
        self._cancel()

    def result(self) -> Generation:
        """Waits for the whole answer. Raises UsageError for who has read a piece, which it would lack."""
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
        """Calls `take` with each piece as it comes, in this event loop; returns at the end of the answer.

        Faster than `async for`: no task is woken for a piece. after: called behind one piece, or behind several that
        came while the loop did something else. Raises what ended the answer, and what these functions raise, which
        cancels the request.
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
        self._mailbox.give(item)  # others may wait for it
        self._mailbox.wake()
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
        self._woken: Callable[[], None] | None = None

    def give(self, item: Piece | End) -> None:
        self.items.put(item)

    def wake(self) -> None:
        """After one or several `give`: for who waits in an event loop."""
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
        """From now on has the running event loop call `take` with what there is; at once with what is there now."""

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
    """Calls functions in an event loop from another thread. Those that are called together cost one call into the loop,
    which is a write to a pipe, and lets go of the interpreter.
    """

    _of: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, Waker]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = ref(loop)
        self._woken: deque[Callable[[], None]] = deque()
        self._is_called = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Waker:
        """That of a loop, asked for in its own thread."""
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
        self._is_called = False  # what is appended from now on is called here or has a call of its own
        while self._woken:
            self._woken.popleft()()


class PieceStream(AsyncIterator[Piece]):
    """The pieces of a request, or of one that is made when the first of them is asked for. That happens in a thread,
    since a chat template or a grammar may take its time.
    """

    def __init__(self, request: Request | Callable[[], Request]):
        self._submit = request
        self._request = request if isinstance(request, Request) else None

    async def __anext__(self) -> Piece:
        return await (self._request or await self._begun()).__anext__()

    async def pass_on(self, take: Callable[[Piece], None], after: Callable[[], None] = nothing) -> None:
        """As `Request.pass_on`."""
        await (self._request or await self._begun()).pass_on(take, after)

    async def _begun(self) -> Request:
        assert not isinstance(self._submit, Request)
        self._request = await asyncio.to_thread(self._submit)
        return self._request

    def progress(self) -> tuple[int, int]:
        """As `Request.progress`; nothing before the request was made."""
        return (0, 0) if self._request is None else self._request.progress()

    async def aclose(self) -> None:
        """Cancels the request; so does leaving the loop and dropping the stream."""
        if self._request is not None:
            self._request.cancel()

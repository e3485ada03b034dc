"""Server-sent events, and work that ends when the client goes away.

Source: WHATWG HTML, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Coroutine, Generator
from json.encoder import encode_basestring_ascii
from typing import Any, TypeVar

import anyio
from starlette.types import Receive, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
TEXT = "\0text\0"  # nobody writes that
_PING = b": ping\n\n"


class ClientGoneError(Exception):
    """The client went away, or does not read what it is sent."""


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One event; JSON in ASCII has no line breaks."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, allow_nan=False)}\n\n".encode("ascii")


class TextEvents:
    """Events that differ in one text alone. data: of one, with TEXT in its place."""

    def __init__(self, data: dict[str, Any], name: str | None = None):
        self._before, self._behind = event(data, name).split(json.dumps(TEXT).encode("ascii"))

    def __call__(self, text: str) -> bytes:
        return self._before + encode_basestring_ascii(text).encode("ascii") + self._behind


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, and cancels it when the client goes away. Raises ClientGoneError then.

    receive: of a request whose body was read.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventSender:
    """Sends a response's events as they come, and a comment after ping_s of silence: proxies end silent connections.

    As an async context manager: the headers go out at the start, and the end of the body at a clean end. Raises
    ClientGoneError there, or from `put`, when the client does not read for send_s.
    """

    def __init__(self, send: Send, *, ping_s: float, send_s: float):
        self._send = send
        self._ping_s, self._send_s = ping_s, send_s
        self._last = 0.0
        self._waiting = bytearray()  # for what is written now
        self._writing: asyncio.Task[None] | None = None
        self._pings: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EventSender:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._last = time.monotonic()
        self._pings = asyncio.ensure_future(self._ping())
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        assert self._pings is not None
        self._pings.cancel()
        await asyncio.gather(self._pings, return_exceptions=True)
        if error is None:
            if self._writing is not None:
                await self._writing
            await self._in_time(self._body(b"", more=False))
        elif self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    def put(self, data: bytes) -> None:
        """Sends it now if the system takes it, as nearly always, else in its turn."""
        if not data:
            return
        if self._writing is not None:
            if not self._writing.done():
                self._waiting += data
                return
            self._writing.result()
        sending: Any = self._body(data)
        try:
            waits_for = sending.send(None)
        except StopIteration:
            self._last = time.monotonic()
        else:
            self._writing = asyncio.ensure_future(self._write(_Begun(sending, waits_for)))

    def _body(self, data: bytes, *, more: bool = True) -> Awaitable[None]:
        return self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _write(self, begun: Awaitable[None]) -> None:
        """Waits for what was begun, and then for what was put meanwhile."""
        await self._in_time(begun)
        while self._waiting:
            data, self._waiting = bytes(self._waiting), bytearray()
            await self._in_time(self._body(data))

    async def _in_time(self, sending: Awaitable[None]) -> None:
        try:
            with anyio.fail_after(self._send_s):
                await sending
        except TimeoutError:
            raise ClientGoneError from None
        self._last = time.monotonic()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(max(self._last + self._ping_s - time.monotonic(), 0.0))
            if time.monotonic() - self._last >= self._ping_s:
                self._last = time.monotonic()
                self.put(_PING)


class _Begun(Awaitable[None]):
    """Awaits the rest of a coroutine that was begun by hand. waits_for: what it yielded last."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any):
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            try:
                try:
                    sent = yield waits_for
                except BaseException as error:
                    waits_for = self._coroutine.throw(error)
                else:
                    waits_for = self._coroutine.send(sent)
            except StopIteration:
                return

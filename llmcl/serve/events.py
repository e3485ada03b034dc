"""Server-sent events, and work that ends when the client leaves.

Source: WHATWG HTML, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from json.encoder import encode_basestring_ascii
from typing import Any, TypeVar

import anyio
from starlette.types import Receive, Send

from llmcl.serve.by_hand import Begun

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
TEXT = "\0text\0"  # a placeholder that no text contains
REPORT_S = 0.25
HEAD_S = 0.05  # how long a stream's headers wait for the first token
PING = b": ping\n\n"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class ClientGoneError(Exception):
    """The client left, or does not read the response."""


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """Encodes one event. JSON in ASCII contains no line breaks."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, allow_nan=False)}\n\n".encode("ascii")


def line(data: dict[str, Any]) -> bytes:
    """Encodes an object for a stream of JSON lines."""
    return f"{json.dumps(data, allow_nan=False)}\n".encode("ascii")


class TextEvents:
    """Encodes events that differ in a single text. data: an event with TEXT as placeholder."""

    def __init__(self, data: dict[str, Any], name: str | None = None):
        self._before, self._behind = event(data, name).split(json.dumps(TEXT).encode("ascii"))

    def __call__(self, text: str) -> bytes:
        return self._before + encode_basestring_ascii(text).encode("ascii") + self._behind


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work` and cancels the work when the client leaves; raises ClientGoneError in that case.

    receive: from a request whose body was read.
    """
    working, leaving = asyncio.current_task(), asyncio.ensure_future(_gone(receive))
    is_over = False

    def left(_: asyncio.Task[None]) -> None:
        if not is_over and working is not None:
            working.cancel()

    leaving.add_done_callback(left)
    try:
        return await work
    except asyncio.CancelledError:
        if leaving.done() and not leaving.cancelled():
            raise ClientGoneError from None
        raise
    finally:
        is_over = True
        leaving.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventSender:
    """Sends events as they come, and a sign of life after ping_s of silence, because proxies and clients drop silent
    connections. alive: makes the sign of life; the default is a comment, but some clients count events only.

    Use as an async context manager: a clean exit sends the end of the body. The headers go out with the first event or
    after HEAD_S. When many requests start together, this delay lets all reach the engine before the first headers are
    sent. A client that does not read for send_s raises ClientGoneError on exit or from `put`. `is_begun`: the headers
    are out.
    """

    def __init__(
        self,
        send: Send,
        *,
        ping_s: float,
        send_s: float,
        alive: Callable[[], bytes] = lambda: PING,
        media_type: bytes = EVENT_STREAM,
    ):
        self._send = send
        self._headers = [(b"content-type", media_type), *_HEADERS]
        self._alive = alive
        self._ping_s, self._send_s = ping_s, send_s
        self._last = 0.0
        self._waiting = bytearray()  # data for the current or the next write
        self._writing: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self.is_begun = False

    async def __aenter__(self) -> EventSender:
        self._last = time.monotonic()
        self._set_alarm(HEAD_S)
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if error is None:
            if self._writing is not None:
                await self._writing
            await self._in_time(self._body(self._taken(), more=False))
        elif self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    def hold(self, data: bytes) -> None:
        """Sends data together with the next event, or after HEAD_S. Only for the first events of a stream."""
        self._waiting += data

    def put(self, data: bytes) -> None:
        """Sends data at once if the socket accepts it (the common case), otherwise after the pending write."""
        if not data:
            return
        self._waiting += data
        if self._writing is not None:
            if not self._writing.done():
                return
            self._writing.result()
        self._send_waiting()

    def _send_waiting(self) -> None:
        sending = Begun(self._body(self._taken()))
        if sending.is_over:
            self._last = time.monotonic()
        else:
            self._writing = asyncio.ensure_future(self._write(sending))

    def _taken(self) -> bytes:
        data, self._waiting = bytes(self._waiting), bytearray()
        return data

    async def _body(self, data: bytes, *, more: bool = True) -> None:
        if not self.is_begun:
            self.is_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _write(self, begun: Awaitable[None]) -> None:
        """Finishes the pending write, then sends everything queued meanwhile."""
        await self._in_time(begun)
        while self._waiting:
            await self._in_time(self._body(self._taken()))

    async def _in_time(self, sending: Awaitable[None]) -> None:
        try:
            with anyio.fail_after(self._send_s):
                await sending
        except TimeoutError:
            raise ClientGoneError from None
        self._last = time.monotonic()

    def _set_alarm(self, seconds: float) -> None:
        self._alarm = asyncio.get_running_loop().call_later(seconds, self._on_silence)

    def _on_silence(self) -> None:
        """Sends the headers if still due, or a sign of life after ping_s without data."""
        left = self._ping_s
        if self._writing is None or self._writing.done():  # otherwise the client is slow and send_s applies
            if self._writing is not None and self._writing.exception() is not None:
                return  # the next `put` raises the error
            left += self._last - time.monotonic()
            if not self.is_begun or left <= 0:
                self._waiting += self._alive() if self.is_begun else b""
                self._send_waiting()
                left = self._ping_s
        self._set_alarm(left)


class Reporting:
    """Calls `report` every REPORT_S inside this async context until it returns False. None: never calls.

    A ClientGoneError from `report` is ignored here; the next event raises it again.
    """

    def __init__(self, report: Callable[[], bool] | None):
        self._report = report
        self._alarm: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        if self._report is not None:
            self._set_alarm()

    async def __aexit__(self, *error: object) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def _set_alarm(self) -> None:
        self._alarm = asyncio.get_running_loop().call_later(REPORT_S, self._on_alarm)

    def _on_alarm(self) -> None:
        assert self._report is not None
        with suppress(ClientGoneError):
            if self._report():
                self._set_alarm()

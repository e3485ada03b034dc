"""Server-sent events, and work that ends when the client goes away.

Source: WHATWG HTML, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio
from starlette.types import Receive, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"


class ClientGoneError(Exception):
    """The client went away, or does not read what it is sent."""


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One event; JSON in ASCII has no line breaks."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, allow_nan=False)}\n\n".encode("ascii")


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

    As an async context manager: the headers go out at the start, and the end of the body at a clean end.
    """

    def __init__(self, send: Send, *, ping_s: float, send_s: float):
        self._send = send
        self._ping_s, self._send_s = ping_s, send_s
        self._last = 0.0
        self._sending = asyncio.Lock()
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
            await self._write(b"", more=False)

    async def __call__(self, data: bytes) -> None:
        if data:
            await self._write(data)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        """Raises ClientGoneError when the client does not read for send_s."""
        async with self._sending:
            body = {"type": "http.response.body", "body": data, "more_body": more}
            try:
                with anyio.fail_after(self._send_s):  # without a task for each event, as asyncio.wait_for makes one
                    await self._send(body)
            except TimeoutError:
                raise ClientGoneError from None
            self._last = time.monotonic()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(max(self._last + self._ping_s - time.monotonic(), 0.0))
            if time.monotonic() - self._last >= self._ping_s:
                await self._write(_PING)

"""The WebSocket form of /v1/responses: a connection whose messages are requests, answered one after another.

Sources: OpenAI's guide "WebSocket mode"; Open Responses, version 2026-04-24.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import anyio
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmcl.serve.access_log import record_of
from llmcl.serve.errors import RequestError
from llmcl.serve.kept import Kept
from llmcl.serve.service import Service

LATEST = "llmcl.latest"  # in the scope of a message's request: the connection's latest response
_SOCKET = "llmcl.socket"
_SWITCHING, _TRY_AGAIN, _TOO_MUCH = 101, 1013, 1009  # RFC 9110 15.2.2, RFC 6455 7.4.1
_ERROR = b'{"type": "error"'


class Sockets:
    """Passes a WebSocket handshake through the application as a GET request: the same checks hold for it.

    The application refuses it with a response, or calls the Socket that `accept` returns.
    """

    def __init__(self, app: ASGIApp, max_waiting_bytes: int, limit_s: float):
        self._app, self._max_waiting_bytes, self._limit_s = app, max_waiting_bytes, limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return

        async def refuse(message: Message) -> None:
            await send({**message, "type": f"websocket.{message['type']}"})

        socket = Socket(self._app, receive, send, self._max_waiting_bytes, self._limit_s)
        await self._app({**scope, "type": "http", "method": "GET", _SOCKET: socket}, receive, refuse)


def is_handshake(scope: Scope) -> bool:
    return _SOCKET in scope


async def accept(request: Request, service: Service) -> ASGIApp:
    """Opens the WebSocket whose handshake the request is."""
    service.served()
    socket: Socket = request.scope[_SOCKET]
    return socket


class Socket:
    """An open WebSocket. Each message becomes a POST request to the application, and the stream's events go back.

    The connection keeps its latest response, stored or not, until a message continues it.
    """

    def __init__(self, app: ASGIApp, receive: Receive, send: Send, max_waiting_bytes: int, limit_s: float):
        """max_waiting_bytes: limit for messages that wait for an earlier answer. limit_s: the connection's longest
        life.
        """
        self._app, self._receive, self._send_message = app, receive, send
        self._max_waiting_bytes, self._limit_s = max_waiting_bytes, limit_s
        self._latest = Kept(1)
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: the client has left
        self._waiting_bytes = 0
        self._is_gone = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).status = _SWITCHING
        await self._send({"type": "websocket.accept"})
        reading = asyncio.ensure_future(self._read())
        try:
            end = anyio.current_time() + self._limit_s
            while True:
                with anyio.fail_after(max(0.0, end - anyio.current_time())):
                    message = await self._messages.get()
                if message is None or self._is_gone.is_set():
                    return
                self._waiting_bytes -= len(message)
                await self._answer(scope, message)
        except TimeoutError:
            text = f"the connection has been open for {self._limit_s:g} s, which is the limit; open another one"
            refusal = RequestError(400, text, code="websocket_connection_limit_reached")
            await self._send_error(refusal.status, refusal.body(scope["path"])["error"])
            await self._send({"type": "websocket.close", "code": _TRY_AGAIN})
        finally:
            reading.cancel()

    async def _read(self) -> None:
        """Takes messages as they come, also during an answer, because only so a disconnect is noticed."""
        while (message := await self._receive())["type"] != "websocket.disconnect":
            if message["type"] == "websocket.receive":
                text = message.get("text")
                body = message.get("bytes") or b"" if text is None else text.encode("utf-8", "surrogatepass")
                self._waiting_bytes += len(body)
                if self._waiting_bytes > self._max_waiting_bytes:
                    reason = "too many messages wait for their answers"
                    await self._send({"type": "websocket.close", "code": _TOO_MUCH, "reason": reason})
                    break
                self._messages.put_nowait(body)
        self._is_gone.set()
        self._messages.put_nowait(None)

    async def _answer(self, handshake: Scope, body: bytes) -> None:
        scope = {**handshake, "method": "POST", LATEST: self._latest}
        del scope[_SOCKET]
        bodies, refused, status = iter([body]), bytearray(), 200

        async def receive() -> Message:
            if (unread := next(bodies, None)) is not None:
                return {"type": "http.request", "body": unread, "more_body": False}
            await self._is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status == 200:
                await self._send_events(message["body"])
            else:
                refused.extend(message["body"])
                if not message.get("more_body", False):
                    await self._send_error(status, json.loads(refused)["error"])

        await self._app(scope, receive, send)

    async def _send_events(self, stream: bytes) -> None:
        """Sends whole events of a stream as a message each; comments are left out."""
        for event in stream.split(b"\n\n"):
            data = event.partition(b"data: ")[2]
            if data.startswith(_ERROR):
                await self._send_error(500, json.loads(data))
            elif data:
                await self._send({"type": "websocket.send", "text": data.decode("ascii")})

    async def _send_error(self, status: int, error: dict[str, Any]) -> None:
        shown = {name: error.get(name) for name in ("message", "param")}
        shown["code"] = error.get("code") or "error"  # always a text in Open Responses
        event = {"type": "error", "status": status, "error": shown}
        await self._send({"type": "websocket.send", "text": json.dumps(event)})

    async def _send(self, message: Message) -> None:
        with suppress(OSError, RuntimeError):  # the client has left, or the connection was closed meanwhile
            await self._send_message(message)

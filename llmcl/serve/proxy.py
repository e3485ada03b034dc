"""Passes a request on to a server on this machine, and the response back as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import h11
from starlette.types import Message, Receive, Scope, Send

from llmcl.serve.access_log import record_of
from llmcl.serve.errors import ANTHROPIC_PATH, OLLAMA_PATH, RequestError
from llmcl.serve.events import event, line

_READ_BYTES = 1 << 16
# Headers about this connection, RFC 9110 7.6.1, and those that the router has checked or answers itself.
_NOT_SENT = {
    *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length"),
    *(b"host", b"expect", b"origin", b"cookie", b"authorization", b"x-api-key"),
}
_NOT_RETURNED = {b"connection", b"keep-alive", b"transfer-encoding", b"date"}


class Passed:
    """An ASGI application that passes one request on.

    name: the server's name in messages. body: the request's body, read before. on_data: takes each part of the
    response's body.
    """

    def __init__(self, name: str, port: int, key: str, body: bytes, on_data: Callable[[bytes], None] | None):
        self._name, self._port, self._key, self._body, self._on_data = name, port, key, body, on_data

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises RequestError if the server breaks off before its response begins."""
        kinds: list[bytes] = []  # the type of the response, once it has begun

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = dict(message["headers"])
                kinds.append(headers.get(b"content-type", b""))
                if (name := headers.get(b"x-request-id")) is not None:
                    record_of(scope).id, record_of(scope).is_noted = name.decode("latin-1"), True
            await send(message)

        try:
            await self._exchange(scope, noting)
        except (OSError, EOFError, h11.RemoteProtocolError):
            text = f"the model {self._name} broke off: its process has ended; the next request loads it again"
            refusal = RequestError(502, text, code="model_ended", retry_after_s=1)
            if not kinds:
                raise refusal from None
            record_of(scope).error, record_of(scope).is_noted = text, False
            body = refusal.body(scope["path"])
            if kinds[0].startswith(b"text/event-stream"):
                last = event(body, "error" if scope["path"].startswith(ANTHROPIC_PATH) else None)
            elif scope["path"].startswith(OLLAMA_PATH) and b"ndjson" in kinds[0]:
                last = line(body)
            else:
                raise
            await send({"type": "http.response.body", "body": last})

    async def _exchange(self, scope: Scope, send: Send) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            connection = h11.Connection(h11.CLIENT)
            writer.write(connection.send(self._request(scope)) or b"")
            writer.write(connection.send(h11.Data(data=self._body)) or b"")
            connection.send(h11.EndOfMessage())
            await writer.drain()
            while (message := connection.next_event()) is not h11.PAUSED:
                if message is h11.NEED_DATA:
                    connection.receive_data(await reader.read(_READ_BYTES))
                elif isinstance(message, h11.Response):
                    await send(_start(message))
                elif isinstance(message, h11.Data):
                    if self._on_data is not None:
                        self._on_data(bytes(message.data))
                    await send({"type": "http.response.body", "body": bytes(message.data), "more_body": True})
                elif isinstance(message, h11.EndOfMessage):
                    await send({"type": "http.response.body", "body": b""})
                    return
                elif isinstance(message, h11.ConnectionClosed):
                    raise EOFError
        finally:
            with suppress(OSError):
                writer.close()  # also when the client has left: the server then ends the answer

    def _request(self, scope: Scope) -> h11.Request:
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _NOT_SENT]
        headers += [
            (b"host", b"127.0.0.1:%d" % self._port),
            (b"authorization", b"Bearer " + self._key.encode()),
            (b"content-length", b"%d" % len(self._body)),
            (b"connection", b"close"),
        ]
        query = scope.get("query_string", b"")
        target = scope["raw_path"] + (b"?" + query if query else b"")
        return h11.Request(method=scope["method"], target=target, headers=headers)


def _start(response: h11.Response) -> Message:
    headers: list[tuple[bytes, bytes]] = [pair for pair in response.headers if pair[0] not in _NOT_RETURNED]
    return {"type": "http.response.start", "status": response.status_code, "headers": headers}

"""The server that cases of http_cases.py are sent to: in this process, in front of an engine that answers by rule."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fake_server import Running, running

from llmcl.errors import LlmclError

ANSWER_LIMIT_S = 20.0
MORE_LIMIT_S = 0.2  # of a request that may not be whole: then the server waits for more
ALLOWED = {501, 503, 505}  # not implemented, no room, another version of HTTP


class HttpFailure(Exception):
    pass


class Refused(LlmclError):
    """An answer from 400 to 499, or one of ALLOWED."""

    where = ""


class HttpServer:
    def __init__(self) -> None:
        self._server: Running | None = None
        self._open = ExitStack()

    def run(self, folder: Path, described: Any) -> None:
        if self._server is None:
            self._server = self._open.enter_context(running())
        given = described["arguments"]
        limit_s = ANSWER_LIMIT_S if given["whole"] else MORE_LIMIT_S
        answer = self._answer(self._server, given["data"].encode("latin-1"), limit_s)
        if not answer and given["whole"]:
            raise HttpFailure("the connection was closed without an answer")
        health = self._server.http.get("/health")
        if health.status_code != 200:
            raise HttpFailure(f"/health: afterwards it answers {health.status_code}")
        head, _, body = answer.partition(b"\r\n\r\n")
        if not head:  # a request that did not end
            raise Refused("nothing was answered; give a whole request")
        status = head.split(b" ", 2)[1]
        if not status.isdigit() or (int(status) >= 500 and int(status) not in ALLOWED):
            raise HttpFailure(f"status {status!r}: {answer[:1500]!r}")
        if b"Traceback" in answer:
            raise HttpFailure(f"a traceback: {answer[:1500]!r}")
        if int(status) >= 400:
            raise Refused(_message(body))

    @staticmethod
    def _answer(server: Running, data: bytes, limit_s: float) -> bytes:
        """What the server sends until it closes the connection, or sends nothing for limit_s."""
        with socket.create_connection(server.listening.getsockname(), timeout=limit_s) as client:
            answer, end = b"", time.monotonic() + ANSWER_LIMIT_S
            try:
                client.sendall(data)
                while part := client.recv(1 << 16):
                    answer += part
                    if time.monotonic() > end:
                        raise HttpFailure(f"no end within {ANSWER_LIMIT_S:g} s: {answer[:500]!r}")
            except TimeoutError:
                if limit_s == ANSWER_LIMIT_S:
                    raise HttpFailure(f"nothing for {limit_s:g} s: {answer[:500]!r}") from None
            except ConnectionError:  # it was refused before it was read
                pass
            return answer


def _message(body: bytes) -> str:
    """The message of an error, or one that stands for an answer without."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return "refused without a message; give another"
    assert isinstance(message, str)
    return message if "; " in message or "expected" in message else f"{message}; give another request"

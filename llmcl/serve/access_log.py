"""Gives every request an id and writes a log line for it."""

from __future__ import annotations

import secrets
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmcl.errors import one_line
from llmcl.serve.page import PREFIX
from llmcl.serve.service import Service, arrived
from llmcl.tools import json_text

CLIENT_GONE = 499  # nginx's status for a client that left
_QUIET_PATHS = {"/health", "/metrics"}  # polled every few seconds
_NOT_SHOWN = {"start", "is_noted"}


@dataclass
class Record:
    """The fields of a request's log line. Times are in milliseconds; None where there is no value."""

    id: str
    method: str
    path: str
    status: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # prompt tokens from the prefix cache
    tokens: int | None = None
    ttft_ms: float | None = None
    tbt_ms: float | None = None  # median
    error: str | None = None
    total_ms: float = 0.0
    start: float = field(default_factory=time.perf_counter, repr=False)
    is_noted: bool = field(default=False, repr=False)  # whether another process has written the line

    def since_start_ms(self) -> float:
        return (time.perf_counter() - self.start) * 1e3

    def note_tbt(self, times_ms: list[float]) -> None:
        times_ms = [ms for ms in times_ms if ms > 0]  # 0: arrived together with the previous token
        self.tbt_ms = round(statistics.median(times_ms), 3) if times_ms else None

    def line(self, log_format: str) -> str:
        values: dict[str, Any] = {name: value for name, value in asdict(self).items() if name not in _NOT_SHOWN}
        if log_format == "json":
            return json_text.dumps(values)
        parts = [self.id, self.method, one_line(self.path), str(self.status)]
        named = ("prompt_tokens", "cached_tokens", "tokens", "ttft_ms", "tbt_ms", "total_ms")
        parts += [f"{name}={values[name]:g}" for name in named if values[name] is not None]
        return " ".join(parts) + (f" error: {one_line(self.error)}" if self.error else "")


def record_of(scope: Scope) -> Record:
    record: Record = scope["llmcl.record"]
    return record


class AccessLog:
    """Outermost middleware: gives each request an id, sends the id in the response headers and logs a line.

    aliases: path -> canonical path. Everything further inside sees the canonical path only.
    """

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str], aliases: Mapping[str, str]):
        self._app = app
        self._service = service
        self._paths = paths
        self._aliases = aliases

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = self._aliases.get(scope["path"], scope["path"])
        record = scope["llmcl.record"] = Record("req_" + secrets.token_hex(8), scope["method"], scope["path"])
        request_id = record.id.encode("ascii")
        identity = [(b"x-request-id", request_id), (b"request-id", request_id), (b"x-content-type-options", b"nosniff")]

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                names = {name for name, _ in message["headers"]}  # a router passes on a model's own id
                message["headers"] = [*message["headers"], *(header for header in identity if header[0] not in names)]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            arrived(scope)
            record.status = record.status or CLIENT_GONE
            record.total_ms = round(record.since_start_ms(), 3)
            self._note(record)

    def _note(self, record: Record) -> None:
        settings = self._service.settings
        api = record.path if record.path in self._paths else "other"  # a client's invented paths must not become labels
        self._service.metrics.requests.labels(api, record.status).inc()
        is_quiet = settings.quiet or record.is_noted or record.path in _QUIET_PATHS or record.path.startswith(PREFIX)
        if not is_quiet:
            with suppress(OSError):  # a full disk or a closed pipe must not end the connection
                print(record.line(settings.log_format), file=sys.stderr, flush=True)

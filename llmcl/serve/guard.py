"""Access control. Decides by a request's headers, before the body is read."""

from __future__ import annotations

import hmac
import re
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from llmcl.errors import shown
from llmcl.serve.access_log import record_of
from llmcl.serve.errors import RequestError
from llmcl.serve.page import PREFIX
from llmcl.serve.settings import Settings, is_loopback

_HOST = re.compile(
    r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^\s:@/?#\[\]\\]+)(?::[0-9]*)?"
)  # RFC 9110 7.2, without characters that no name has
OPEN_PATHS = {"/", "/health"}  # open without a key, like the page's files: the page itself asks for the key


class Guard:
    """Refuses requests without a valid key (if keys are set), and requests from a web page of another origin.

    A browser lets any page send requests to this machine. Such a request carries the page's origin. A request through a
    name redirected to this machine's address (DNS rebinding) carries a foreign host.
    """

    def __init__(self, app: ASGIApp, settings: Settings):
        self._app = app
        self._settings = settings
        self._is_local = settings.is_local
        self._digests = [sha256(key.encode("ascii")).digest() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope["path"], Headers(scope=scope))
            except RequestError as error:
                record_of(scope).error = error.message
                answer = JSONResponse(error.body(scope["path"]), error.status, error.headers | {"connection": "close"})
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        host, origins = headers.get("host", ""), headers.getlist("origin")
        # No host header means no browser: browsers always send one.
        if self._is_local and not self._digests and host and not _is_loopback(host):
            raise RequestError(
                403, f"the host {shown(host)} is not this machine; start the server with --api-key to use it from there"
            )
        allowed = self._settings.cors_origins
        for origin in [] if "*" in allowed else origins:
            if origin not in allowed and not (host and origin.lower() in _origins(host.lower())):
                raise RequestError(403, f"the origin {shown(origin)} is not allowed (--cors-origin)")
        if self._digests and path not in OPEN_PATHS and not path.startswith(PREFIX) and not self._has_key(headers):
            raise RequestError(
                401,
                "no valid API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
            )

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        presented_key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = sha256(presented_key.encode("utf-8", "surrogateescape")).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0  # checks every key: constant time


def _is_loopback(host: str) -> bool:
    """Returns whether a Host header names this machine. False for a header that no browser sends."""
    named = _HOST.fullmatch(host)
    return named is not None and is_loopback(named["name"])


def _origins(host: str) -> tuple[str, str]:
    """Returns the origins of a page served from here, possibly through a TLS proxy."""
    return f"http://{host}", f"https://{host}"

"""The ASGI application: routes each path to an endpoint and answers errors in the format of the API called."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from llmcl.errors import one_line
from llmcl.serve import kept_responses, loras, ollama_chat, ollama_models, own, responses_socket
from llmcl.serve.access_log import CLIENT_GONE, AccessLog, record_of
from llmcl.serve.chat_completions import chat_completions
from llmcl.serve.completions import completions
from llmcl.serve.embeddings import embeddings, ollama_embed
from llmcl.serve.errors import RequestError
from llmcl.serve.generation import AsciiJSONResponse, as_refusal
from llmcl.serve.guard import Guard
from llmcl.serve.infill import infill
from llmcl.serve.messages import count_tokens, messages
from llmcl.serve.openapi import openapi
from llmcl.serve.page import PREFIX, page
from llmcl.serve.rerank import rerank
from llmcl.serve.responses import responses
from llmcl.serve.service import Service

_MODEL, _RESPONSE, _INPUT_ITEMS = "/v1/models/{name}", "/v1/responses/{id}", "/v1/responses/{id}/input_items"
_PAGE_FILE = PREFIX + "{name}"
# Paths with parameters. A model's name may contain slashes.
_PATTERNS = {
    _PAGE_FILE: re.compile(PREFIX + r"(?P<name>[^/]+\.(?:css|js))"),
    _MODEL: re.compile(r"/v1/models/(?P<name>.*)", re.DOTALL),
    _RESPONSE: re.compile(r"/v1/responses/(?P<id>[^/]+)"),
    _INPUT_ITEMS: re.compile(r"/v1/responses/(?P<id>[^/]+)/input_items"),
}
Endpoint = Callable[[Request, Service], Awaitable[ASGIApp]]

GET: dict[str, Endpoint] = {
    "/": page,
    _PAGE_FILE: page,
    "/health": own.health,
    "/metrics": own.metrics,
    "/openapi.json": openapi,
    "/props": own.props,
    "/lora-adapters": loras.list_loras,
    "/v1/models": own.models,
    _MODEL: own.model,
    _RESPONSE: kept_responses.retrieve,
    _INPUT_ITEMS: kept_responses.input_items,
    "/api/ps": ollama_models.running,
    "/api/tags": ollama_models.tags,
    "/api/version": ollama_models.version,
}
POST: dict[str, Endpoint] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/embeddings": embeddings,
    "/v1/rerank": rerank,
    "/v1/responses": responses,
    "/v1/responses/compact": kept_responses.compact,
    "/v1/messages": messages,
    "/v1/messages/count_tokens": count_tokens,
    "/lora-adapters": loras.set_scales,
    "/v1/load_lora_adapter": loras.load_lora,
    "/v1/unload_lora_adapter": loras.unload_lora,
    "/tokenize": own.tokenize,
    "/detokenize": own.detokenize,
    "/apply-template": own.apply_template,
    "/infill": infill,
    "/api/chat": ollama_chat.chat,
    "/api/embed": ollama_embed,
    "/api/embeddings": ollama_embed,
    "/api/generate": ollama_chat.generate,
    "/api/pull": ollama_models.pull,
    "/api/show": ollama_models.show,
}
DELETE: dict[str, Endpoint] = {_RESPONSE: kept_responses.delete}
SOCKETS: dict[str, Endpoint] = {"/v1/responses": responses_socket.accept}
_METHODS = {"GET": GET, "HEAD": GET, "POST": POST, "DELETE": DELETE}
# llama-server's aliases for these paths, for clients configured for it.
ALIASES = {
    "/v1/health": "/health",
    "/models": "/v1/models",
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/v1/completions",
    "/embeddings": "/v1/embeddings",
    "/rerank": "/v1/rerank",
    "/responses": "/v1/responses",
    "/responses/compact": "/v1/responses/compact",
}
# Paths whose requests, unless refused, run the engine.
ANSWERING = frozenset(
    (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/compact",
        "/v1/messages",
        "/infill",
        "/api/chat",
        "/api/generate",
    )
)


def make_app(
    service: Service, find: Callable[[Scope], Endpoint] | None = None, more_paths: Iterable[str] = ()
) -> ASGIApp:
    """Builds the server's ASGI application. find: returns the endpoint of a request; None: `endpoint_of`. more_paths:
    paths that only `find` knows.
    """
    settings = service.settings
    app: ASGIApp = Guard(Endpoints(service, find or endpoint_of), settings)
    if settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after"],
        )
    app = AccessLog(app, service, frozenset({*GET, *POST, *more_paths}), ALIASES)
    return responses_socket.Sockets(app, settings.max_body_bytes, settings.socket_s)


class Endpoints:
    """Calls the endpoint for the request's path. An exception becomes the response."""

    def __init__(self, service: Service, find: Callable[[Scope], Endpoint]):
        self._service, self._find = service, find

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            answer = await self._find(scope)(request, self._service)
            await answer(scope, receive, send)
        except ClientDisconnect:
            record_of(scope).status = CLIENT_GONE
        except Exception as error:
            if (record := record_of(scope)).status:
                raise  # too late: the response has begun
            refusal = as_refusal(error, self._service.loaded)
            record.error = refusal.message
            answer = AsciiJSONResponse(refusal.body(scope["path"]), refusal.status, refusal.headers)
            await answer(scope, receive, send)


def endpoint_of(scope: Scope) -> Endpoint:
    """Returns the endpoint for a path and method. Raises RequestError if there is none."""
    path, method = scope["path"], scope["method"]
    if responses_socket.is_handshake(scope):
        if (endpoint := SOCKETS.get(path)) is not None:
            return endpoint
        raise RequestError(404, f"no WebSocket is served at {one_line(path)}", code="not_found")
    if path not in POST:
        for pattern, expression in _PATTERNS.items():
            if (match := expression.fullmatch(path)) is not None:
                scope["path_params"], path = match.groupdict(), pattern
                break
    shown = one_line(f"{method[:20]} {scope['path']}")
    if (endpoint := _METHODS.get(method, {}).get(path)) is not None:
        return endpoint
    if allow := ", ".join(name for name, endpoints in _METHODS.items() if path in endpoints):
        raise RequestError(405, f"Method Not Allowed: {shown}", code="not_found", allow=allow)
    raise RequestError(404, f"Not Found: {shown}", code="not_found")

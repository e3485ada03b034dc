"""The application: which path is answered by what, and errors in the form of the API that was called."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from llmcl.serve import own
from llmcl.serve.access_log import CLIENT_GONE, AccessLog, record_of
from llmcl.serve.chat_completions import chat_completions
from llmcl.serve.completions import completions
from llmcl.serve.errors import RequestError
from llmcl.serve.generation import AsciiJSONResponse, as_refusal
from llmcl.serve.guard import Guard
from llmcl.serve.messages import count_tokens, messages
from llmcl.serve.openapi import openapi
from llmcl.serve.page import page
from llmcl.serve.responses import responses
from llmcl.serve.service import Service, arrived

Endpoint = Callable[[Request, Service], Awaitable[Response]]

GET: dict[str, Endpoint] = {
    "/": page,
    "/health": own.health,
    "/metrics": own.metrics,
    "/openapi.json": openapi,
    "/props": own.props,
    "/v1/models": own.models,
    "/v1/models/{name:path}": own.model,
}
POST: dict[str, Endpoint] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/embeddings": own.embeddings,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/v1/messages/count_tokens": count_tokens,
    "/tokenize": own.tokenize,
    "/detokenize": own.detokenize,
    "/apply-template": own.apply_template,
}


def make_app(service: Service) -> Starlette:
    """The ASGI application of a server."""

    def bound(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await endpoint(request, service)
            except ClientDisconnect:
                record_of(request.scope).status = CLIENT_GONE
                return Response()
            except Exception as error:
                arrived(request.scope)
                return _refused(request, as_refusal(error))

        return answer

    routes = [
        Route(path, bound(endpoint), methods=[method])
        for method, endpoints in (("GET", GET), ("POST", POST))
        for path, endpoint in endpoints.items()
    ]
    settings = service.settings
    middleware = [Middleware(AccessLog, service=service, paths=frozenset({*GET, *POST}))]
    if settings.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "request-id", "retry-after"],
            )
        )
    middleware.append(Middleware(Guard, settings=settings))
    handlers: dict[Any, Any] = {HTTPException: _on_http_exception, RequestError: _on_refusal}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    """A path or a method that is not served."""
    message = f"{error.detail}: {request.method} {request.url.path[:200]}"
    return _refused(request, RequestError(error.status_code, message, code="not_found"))


async def _on_refusal(request: Request, refusal: RequestError) -> Response:
    return _refused(request, refusal)


def _refused(request: Request, refusal: RequestError) -> Response:
    path = request.url.path
    record_of(request.scope).error = refusal.message
    return AsciiJSONResponse(refusal.body(path), refusal.status, refusal.headers)

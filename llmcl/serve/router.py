"""A server for several models: each has a server in a process of its own, and requests are passed on by name.

Source for paths, statuses and fields: llama-server's router mode (ggml-org/llama.cpp, tools/server).
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

import llmcl
from llmcl.serve import ollama_models, own, page, responses_socket, run
from llmcl.serve.access_log import CLIENT_GONE, record_of
from llmcl.serve.app import Endpoint, endpoint_of, make_app
from llmcl.serve.body import parse_fields, read_body, read_fields
from llmcl.serve.errors import OLLAMA_PATH, RequestError
from llmcl.serve.events import ClientGoneError, unless_gone
from llmcl.serve.openapi import MAX_INT, describe
from llmcl.serve.proxy import Passed
from llmcl.serve.router_models import LOADED, LOADING, SLEEPING, Models, RoutedModel, RouterOptions
from llmcl.serve.service import Service
from llmcl.serve.settings import Settings

_MOST_RESPONSES = 4096  # whose models are remembered
_RESPONSE_ID = re.compile(rb'"id": ?"(resp_[0-9a-f]{24})"')
_RESPONSES = "/v1/responses"
_SUMMARIES = {"/models/load": "Begins to load a model.", "/models/unload": "Begins to unload a model."}


def serve_models(settings: Settings, options: RouterOptions) -> None:
    """Serves until a signal comes, then ends all models."""
    service = Service(replace(settings, state_dir=None))
    listening = run.listen(settings.host, settings.port)
    models = Models(options)
    router = Router(models, options, settings)
    run.announce(settings, listening)
    try:
        run.run(run.Server(service, make_app(service, router.find, router.post)), listening)
    finally:
        models.close()


def model_state_dir(folder: Path, name: str) -> Path:
    """Returns a model's folder within --state-dir."""
    return folder / quote(name, safe="")


class Router:
    """Answers what concerns all models, and passes on the rest."""

    def __init__(self, models: Models, options: RouterOptions, settings: Settings):
        self._models, self._options, self._settings = models, options, settings
        self._created = int(time.time())
        self._responses: OrderedDict[str, str] = OrderedDict()  # id of a kept response -> model
        self.get: dict[str, Endpoint] = {
            "/health": self._health,
            "/v1/models": self._list,
            "/api/ps": self._running,
            "/api/tags": self._tags,
            "/api/version": ollama_models.version,
        }
        self.post: dict[str, Endpoint] = {"/models/load": self._load, "/models/unload": self._unload}
        # With `?model=` a model answers these.
        self._without_model: dict[str, Endpoint] = {
            "/metrics": own.metrics,
            "/openapi.json": self._openapi,
            "/props": self._props,
        }

    def find(self, scope: Scope) -> Endpoint:
        """Returns the endpoint for a path and method. Raises RequestError if there is none."""
        path, method = scope["path"], scope["method"]
        if responses_socket.is_handshake(scope):
            raise RequestError(501, "a server of several models has no WebSocket; send POST requests", code="not_found")
        if path in self.post and method == "POST":
            return self.post[path]
        single = endpoint_of(scope)
        if single is page.page:
            return single
        if single is own.model:
            return self._model
        return self._pass_on if method == "POST" else self.get.get(path, self._pass_on)

    async def _pass_on(self, request: Request, service: Service) -> ASGIApp:
        """Finds the model of a request: by its body, by `?model=`, or by the response that it continues or reads."""
        path, name = request.scope["path"], request.query_params.get("model")
        if request.method != "POST":
            if (response_id := request.path_params.get("id")) is not None:
                name = self._keeper(response_id)
            elif not name and path in self._without_model:
                return await self._without_model[path](request, service)
            return self._use(service, self._models.named(name), b"")
        body = await read_body(request, self._settings, takes_images=True)  # the model has its own limit
        fields = await parse_fields(body)
        name = fields.text("model") or name
        if path.startswith(OLLAMA_PATH):
            name = name or fields.text("name")
            if name is not None and name not in self._models.by_name:
                name = name.removesuffix(ollama_models.LATEST)
        elif not name and (response_id := fields.text("previous_response_id")) is not None:
            name = self._keeper(response_id)
        return self._use(service, self._models.named(name), body)

    def _use(self, service: Service, model: RoutedModel, body: bytes) -> ASGIApp:
        """Returns the response that the model gives."""

        async def use(scope: Scope, receive: Receive, send: Send) -> None:
            if service.stopping:
                raise RequestError(503, "the server is stopping", code="unavailable", retry_after_s=5)
            service.in_flight += 1
            try:
                await unless_gone(receive, self._pass(model, body, scope, receive, send))
            except ClientGoneError:
                record_of(scope).status = CLIENT_GONE
            finally:
                service.in_flight -= 1

        return use

    async def _pass(self, model: RoutedModel, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        is_use, autoload = scope["method"] == "POST", Request(scope).query_params.get("autoload")
        wanted = None if autoload is None else autoload in ("true", "1")
        async with self._models.in_use(model, autoload=wanted, is_use=is_use) as process:
            on_data = self._noting(model) if is_use and scope["path"] == _RESPONSES else None
            await Passed(model.name, process.port, process.key, body, on_data)(scope, receive, send)

    def _noting(self, model: RoutedModel) -> Callable[[bytes], None]:
        """Returns a function that takes the parts of an answer and remembers which model keeps it."""
        is_noted = False

        def note(data: bytes) -> None:
            nonlocal is_noted
            if not is_noted and (match := _RESPONSE_ID.search(data)) is not None:
                is_noted = True
                self._responses[match[1].decode()] = model.name
                if len(self._responses) > _MOST_RESPONSES:
                    self._responses.popitem(last=False)

        return note

    def _keeper(self, response_id: str) -> str:
        """Returns the name of the model that keeps a response."""
        folder = self._settings.state_dir
        if (name := self._responses.get(response_id)) is not None:
            if folder is None and self._models.named(name).status != LOADED:
                message = f"the response is gone: the model {name} was unloaded (--state-dir keeps responses)"
                raise RequestError(404, message, code="not_found")
            return name
        if folder is not None and response_id.isidentifier():
            for name in self._models.by_name:
                if (model_state_dir(folder, name) / f"{response_id}.json").is_file():
                    return name
        raise RequestError(404, f"there is no response {response_id[:80]}", code="not_found")

    # ---- about all models ----

    async def _health(self, request: Request, service: Service) -> Response:
        return JSONResponse({"status": "stopping"}, 503) if service.stopping else JSONResponse({"status": "ok"})

    async def _props(self, request: Request, service: Service) -> Response:
        return JSONResponse(
            {
                "role": "router",
                "max_instances": self._options.most,
                "models_autoload": self._options.autoload,
                "model_alias": "llmcl",
                "model_path": "none",
                "default_generation_settings": {"params": {}, "n_ctx": 0},
                "build_info": f"llmcl {llmcl.__version__}",
            }
        )

    async def _openapi(self, request: Request, service: Service) -> Response:
        """Describes what a server of one model answers, and what the router adds."""
        described = describe(MAX_INT, self._settings.max_in_flight)
        body = {"type": "object", "properties": {"model": {"type": "string"}}, "required": ["model"]}
        post = {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}
        post["responses"] = {"200": {"description": "Done."}, "default": {"description": "Refused."}}
        described["paths"] |= {path: {"post": post | {"summary": _SUMMARIES[path]}} for path in self.post}
        return JSONResponse(described)

    async def _list(self, request: Request, service: Service) -> Response:
        """Lists all models in the client's format, with their statuses. `?reload=1` looks for models again."""
        if request.query_params.get("reload"):
            self._models.rescan()
        entries = [self._entry(request, model) for model in self._models.by_name.values()]
        if "anthropic-version" in request.headers:
            ids = [entry["id"] for entry in entries] or [None]
            return JSONResponse({"data": entries, "has_more": False, "first_id": ids[0], "last_id": ids[-1]})
        more: dict[str, Any] = {"models": []} if "client_version" in request.query_params else {}
        return JSONResponse({"object": "list", "data": entries, **more})

    async def _model(self, request: Request, service: Service) -> Response:
        return JSONResponse(self._entry(request, self._models.named(request.path_params["name"])))

    def _entry(self, request: Request, model: RoutedModel) -> dict[str, Any]:
        if "anthropic-version" in request.headers:
            return own.anthropic_model(model.name, self._created, model.max_context or None)
        return own.openai_model(model.name, self._created) | {"status": model.show_status()}

    async def _load(self, request: Request, service: Service) -> Response:
        """{"model": name} -> {"success": true}. The model's status tells when it is loaded."""
        model = await self._in_body(request)
        if model.status in (LOADING, LOADED):
            raise RequestError(400, f"the model {model.name} is {model.status} already", "model", "model_is_loaded")
        self._models.load(model)
        return JSONResponse({"success": True})

    async def _unload(self, request: Request, service: Service) -> Response:
        """{"model": name} -> {"success": true}. Answers under way may end."""
        model = await self._in_body(request)
        if model.status not in (LOADING, LOADED, SLEEPING):
            raise RequestError(400, f"the model {model.name} is not loaded", "model", "model_not_loaded")
        self._models.unload(model, "a client asked for it")
        return JSONResponse({"success": True})

    async def _in_body(self, request: Request) -> RoutedModel:
        return self._models.named((await read_fields(request, self._settings)).text("model"))

    async def _tags(self, request: Request, service: Service) -> Response:
        models = self._models.by_name.values()
        return JSONResponse({"models": [ollama_models.tags_entry(m.name, m.facts, self._created) for m in models]})

    async def _running(self, request: Request, service: Service) -> Response:
        loaded = [model for model in self._models.by_name.values() if model.status == LOADED]
        return JSONResponse({"models": [ollama_models.running_entry(m.name, m.facts, m.max_context) for m in loaded]})

"""Endpoints that list, load and unload LoRA adapters.

They are llama-server's /lora-adapters, and vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from llmcl.errors import CheckpointError, UsageError, shown
from llmcl.serve.body import read_fields, read_items
from llmcl.serve.errors import RequestError
from llmcl.serve.fields import Fields, wrong
from llmcl.serve.generation import AsciiJSONResponse
from llmcl.serve.lora_choice import lora_names, scales_of
from llmcl.serve.lora_engine import LoraEngine
from llmcl.serve.service import Service

if TYPE_CHECKING:
    from llmcl.serve.served import Served


async def list_loras(request: Request, service: Service) -> Response:
    """Lists the adapters, with the scales for requests that choose nothing."""
    return AsciiJSONResponse(_listed(service.served()))


async def set_scales(request: Request, service: Service) -> Response:
    """Sets the scales for requests that choose nothing: [{"id": 0, "scale": 0.5}]. Other adapters get 0."""
    served = service.served()
    fields = Fields({"lora": await read_items(request, service.settings)})
    scales = scales_of(fields, lora_names(served))
    if served.loras is not None:
        served.loras.loras.scales = {name: scale for name, scale in scales.items() if scale}
    return AsciiJSONResponse(_listed(served))


def _listed(served: Served) -> list[dict[str, Any]]:
    if served.loras is None:
        return []
    adapters = served.loras.loras
    return [
        {"id": i, "name": name, "path": adapter.path, "scale": adapters.scales.get(name, 0.0), "rank": adapter.rank}
        for i, (name, adapter) in enumerate(adapters.loaded.items())
    ]


async def load_lora(request: Request, service: Service) -> Response:
    """Loads an adapter between two steps: {"lora_name": name, "lora_path": a path of the server}."""
    engine, fields = await _updates(request, service)
    name, path = (fields.required(field, "a string") for field in ("lora_name", "lora_path"))
    if not isinstance(name, str) or not isinstance(path, str):
        raise wrong("lora_path", path, "a string")
    if name in engine.loras.loaded and not fields.flag("load_inplace"):
        raise RequestError(400, f"lora_name: adapter {shown(name)} is loaded already; unload it first", "lora_name")
    from llmcl.checkpoint.lora import is_named  # imported late: the server listens before the engine is loaded

    if not is_named(f"{name}={path}"):
        raise wrong("lora_name", name, "letters, digits, dots, dashes and underscores")
    try:
        await asyncio.to_thread(engine.load_lora, f"{name}={path}")
    except (CheckpointError, UsageError) as error:
        raise RequestError(400, str(error), "lora_path", "invalid_value") from None
    return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")


async def unload_lora(request: Request, service: Service) -> Response:
    """Unloads an adapter: {"lora_name": name}. Running answers keep it to their end."""
    engine, fields = await _updates(request, service)
    name = fields.required("lora_name", "a string")
    try:
        await asyncio.to_thread(engine.unload_lora, name)
    except UsageError as error:
        raise RequestError(404, str(error), "lora_name", "not_found") from None
    return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")


async def _updates(request: Request, service: Service) -> tuple[LoraEngine, Fields]:
    """Returns the engine and the request's fields. Raises RequestError if clients may not load adapters."""
    served = service.served()
    fields = await read_fields(request, service.settings)
    if not service.settings.lora_updates:
        message = "clients may not load adapters: start the server with --allow-lora-updates, or load them with --lora"
        raise RequestError(403, message, code="forbidden")
    if served.loras is None:
        raise RequestError(501, "this server makes no text, so it takes no adapters", code="unsupported")
    return served.loras, fields

"""Endpoints of llmcl itself or about the server: health, metrics, models, tokens and templates."""

from __future__ import annotations

import asyncio
from datetime import datetime, timezone
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import llmcl
from llmcl.serve.body import read_fields
from llmcl.serve.conversation import openai_messages, read_ending, template_variables
from llmcl.serve.errors import RequestError
from llmcl.serve.fields import as_whole, wrong
from llmcl.serve.generation import AsciiJSONResponse
from llmcl.serve.image_parts import for_template
from llmcl.serve.images import check_vision
from llmcl.serve.lora_choice import lora_names
from llmcl.serve.served import Served
from llmcl.serve.service import Service


async def health(request: Request, service: Service) -> Response:
    """Answers 200 once requests are served. Answers 503 with the current activity while loading or stopping."""
    status, body = service.health()
    return JSONResponse(body, status)


async def metrics(request: Request, service: Service) -> Response:
    return Response(service.metrics.show(), media_type=CONTENT_TYPE_LATEST)


async def props(request: Request, service: Service) -> Response:
    served, settings = service.served(), service.settings
    return AsciiJSONResponse(
        {
            "model": served.name,
            "device": served.device,
            "total_slots": settings.max_sequences,
            "max_queue": settings.max_queue,
            "default_generation_settings": {"n_ctx": served.max_context},
            "chat_template": served.tokenizer.chat_template or "",
            "modalities": {"vision": served.takes_images, "audio": False},
            "build_info": f"llmcl {llmcl.__version__}",
        }
    )


async def models(request: Request, service: Service) -> Response:
    """Lists the model in the client's format. Anthropic's clients send an API version, Codex sends a client version.

    Codex expects a second list with model abilities, and falls back to built-in knowledge if the list is empty.
    """
    served = service.served()
    if "anthropic-version" in request.headers:
        return JSONResponse({"data": [_anthropic(served)], "has_more": False, "first_id": None, "last_id": None})
    more: dict[str, Any] = {"models": []} if "client_version" in request.query_params else {}
    listed = [_openai(served)]
    if (embedder := served.embedder) is not None and embedder.name != served.name:
        listed.append(listed[0] | {"id": embedder.name})
    listed += [listed[0] | {"id": name, "parent": served.name} for name in lora_names(served)]
    return JSONResponse({"object": "list", "data": listed, **more})


async def model(request: Request, service: Service) -> Response:
    served, name = service.served(), request.path_params["name"]
    if name not in (served.name, *lora_names(served)):
        raise RequestError(404, f"there is no such model; the model here is {served.name}", "model", "model_not_found")
    described = _anthropic(served) if "anthropic-version" in request.headers else _openai(served)
    return JSONResponse(described | {"id": name})


def _openai(served: Served) -> dict[str, Any]:
    described = openai_model(served.name, served.created)
    return described | {"capabilities": ["completion", "multimodal"]} if served.takes_images else described


def _anthropic(served: Served) -> dict[str, Any]:
    return anthropic_model(served.name, served.created, served.max_context)


def openai_model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "llmcl"}


def anthropic_model(name: str, created: int, max_context: int | None) -> dict[str, Any]:
    """max_context: None if unknown."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, timezone.utc).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": max_context,
        "max_tokens": max_context,
    }


async def tokenize(request: Request, service: Service) -> Response:
    """{"content": text, "add_special": false, "with_pieces": false} -> {"tokens": ids}; with_pieces adds each token's
    text.
    """
    served = service.served()
    fields = await read_fields(request, service.settings)
    if (text := fields.text("content")) is None:
        raise wrong("content", None, "a string")
    served.check_text(text, counted=True)
    add_special, with_pieces = fields.flag("add_special"), fields.flag("with_pieces")

    def work() -> Response:
        ids = served.tokenizer.encode(text, add_special)
        return AsciiJSONResponse({"tokens": [_with_piece(served, i) for i in ids] if with_pieces else ids})

    return await service.count(request, served.beside(work))


def _with_piece(served: Served, token_id: int) -> dict[str, Any]:
    """Writes a token in llama-server's format: bytes that are not valid text become a list of numbers."""
    data = served.tokenizer.token_bytes(token_id)
    try:
        piece: str | list[int] = data.decode() if data else served.tokenizer.token(token_id) or ""
    except UnicodeDecodeError:
        piece = [*data]
    return {"id": token_id, "piece": piece}


async def detokenize(request: Request, service: Service) -> Response:
    """{"tokens": ids} -> {"content": text}."""
    served = service.served()
    fields = await read_fields(request, service.settings)
    tokens = fields.items("tokens")

    def work() -> Response:
        ids = [i for i in map(as_whole, tokens) if i is not None and 0 <= i < served.vocab_size]
        if len(ids) < len(tokens):
            raise wrong("tokens", tokens, f"a list of token ids from 0 to {served.vocab_size - 1}")
        return AsciiJSONResponse({"content": served.tokenizer.decode(ids)})

    return await service.count(request, served.beside(work))


async def apply_template(request: Request, service: Service) -> Response:
    """{"messages": ...} -> {"prompt": the text for the model}."""
    served = service.served()
    fields = await read_fields(request, service.settings)
    messages, variables = openai_messages(fields), template_variables(fields)
    ending = read_ending(fields, messages)
    check_vision(served, messages)
    shown = [for_template(message) for message in messages]
    prompt = await asyncio.to_thread(served.render, shown, None, variables, ending)
    return AsciiJSONResponse({"prompt": prompt})

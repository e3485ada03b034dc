"""What Ollama's API says about models: /api/tags, /api/show, /api/ps, /api/pull and others.

Source: ollama/ollama, api.md.
"""

from __future__ import annotations

import hashlib
from datetime import datetime, timezone
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from llmcl.errors import shown
from llmcl.serve.body import read_fields
from llmcl.serve.errors import RequestError
from llmcl.serve.events import line
from llmcl.serve.fields import Fields
from llmcl.serve.generation import AsciiJSONResponse
from llmcl.serve.model_facts import ModelFacts
from llmcl.serve.ollama_schemas import LINES
from llmcl.serve.served import Served
from llmcl.serve.service import Service
from llmcl.serve.thoughts import thinks
from llmcl.serve.tool_families import knows_tools
from llmcl.tokenizer.infill_tokens import infill_tokens

VERSION = "0.12.11"  # the version whose API this is: clients refuse older ones
LATEST = ":latest"
_REMEDY = "; fetch another one with `llmcl pull MODEL` and start a server for it, `llmcl serve -m MODEL`"
_NEVER = "2318-01-01T00:00:00Z"  # the expiry of a model that stays loaded, about what Ollama says


async def version(request: Request, service: Service) -> Response:
    return JSONResponse({"version": VERSION})


async def tags(request: Request, service: Service) -> Response:
    """Lists the model."""
    served = service.served()
    return JSONResponse({"models": [tags_entry(served.name, served.facts, served.created)]})


async def running(request: Request, service: Service) -> Response:
    """Lists the loaded model."""
    served = service.served()
    return JSONResponse({"models": [running_entry(served.name, served.facts, served.max_context)]})


async def show(request: Request, service: Service) -> Response:
    served = service.served()
    _named(await read_fields(request, service.settings), served)
    facts, family = served.facts, served.facts.family
    info = {
        "general.architecture": family,
        "general.basename": served.name,
        "general.parameter_count": facts.n_parameters,
        f"{family}.context_length": served.max_context,
        f"{family}.embedding_length": facts.embedding_size,
    }
    return AsciiJSONResponse(
        {
            "modelfile": f"# llmcl serve -m {served.name}\n",
            "parameters": f"num_ctx {served.max_context}",
            "template": served.tokenizer.chat_template or "",
            "details": _details(facts),
            "model_info": info,
            "capabilities": capabilities(served),
            "modified_at": time_text(served.created),
        }
    )


async def pull(request: Request, service: Service) -> ASGIApp:
    """Succeeds for the model that is already there. Raises RequestError for any other: nothing is downloaded."""
    served = service.served()
    fields = await read_fields(request, service.settings)
    name = _named(fields, served, _REMEDY)
    if not fields.flag("stream", True):
        return JSONResponse({"status": "success"})
    events = [{"status": "pulling manifest"}, {"status": f"{name} is already here"}, {"status": "success"}]
    return Response(b"".join(map(line, events)), media_type=LINES)


def capabilities(served: Served) -> list[str]:
    """Returns the abilities in Ollama's words."""
    template = served.tokenizer.chat_template
    abilities = {"completion": True, "tools": knows_tools(template), "thinking": thinks(template)}
    abilities["vision"] = served.takes_images
    abilities["insert"] = not infill_tokens(served.tokenizer).missing
    return [name for name, is_there in abilities.items() if is_there]


def listed_name(name: str) -> str:
    """Returns the model's name with a tag, which all names in Ollama's API have."""
    return name if ":" in name else name + LATEST


def _named(fields: Fields, served: Served, remedy: str = "") -> str:
    """Reads a model's name, in the field `model` or the older `name`. Raises RequestError for another model."""
    name = fields.text("model") or fields.text("name")
    if name is None:
        raise RequestError(400, "model is required", "model", "missing_required_parameter")
    if name.lower().removesuffix(LATEST) != served.name.lower().removesuffix(LATEST):
        message = f"model {shown(name)} not found; the model here is {served.name}{remedy}"
        raise RequestError(404, message, "model", "model_not_found")
    return name


def tags_entry(name: str, facts: ModelFacts, created: int) -> dict[str, Any]:
    """Returns a model of /api/tags."""
    return _entry(name, facts) | {"modified_at": time_text(created)}


def running_entry(name: str, facts: ModelFacts, max_context: int) -> dict[str, Any]:
    """Returns a model of /api/ps."""
    return _entry(name, facts) | {"expires_at": _NEVER, "size_vram": facts.n_bytes, "context_length": max_context}


def _entry(name: str, facts: ModelFacts) -> dict[str, Any]:
    listed = listed_name(name)
    digest = hashlib.sha256(f"{name} {facts}".encode()).hexdigest()  # identifies the model at this server only
    return {"name": listed, "model": listed, "size": facts.n_bytes, "digest": digest, "details": _details(facts)}


def _details(facts: ModelFacts) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf" if facts.is_gguf else "safetensors",
        "family": facts.family,
        "families": [facts.family],
        "parameter_size": facts.parameter_size,
        "quantization_level": facts.weight_type.upper(),
    }


def time_text(seconds: float) -> str:
    """Returns a time since the epoch as Ollama writes it."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")

"""The part of /openapi.json about Ollama's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_LIST: Schema = {"type": "array", "items": {"type": "object"}}
_FLAG: Schema = {"type": ["boolean", "null"]}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_NAMED: Schema = {"type": "object", "properties": {"model": _TEXT}, "required": ["model"]}
_NUMBERS: Schema = {"type": "array", "items": {"type": "number"}}
LINES = "application/x-ndjson"

# Path -> summary, media type, and schema of the 200 response.
PAGES: dict[str, tuple[str, str, Schema]] = {
    path: (summary, "application/json", {"type": "object", "properties": {field: kind}, "required": [field]})
    for path, summary, field, kind in (
        ("/api/ps", "The loaded model, as Ollama's API has it.", "models", _LIST),
        ("/api/tags", "The one model, as Ollama's API has it.", "models", _LIST),
        ("/api/version", "The version of Ollama whose API this is.", "version", _TEXT),
    )
}


def bodies(sampling: Mapping[str, Schema], message: Schema, tools: Schema) -> dict[str, tuple[str, Schema, Schema]]:
    """Returns for each path a summary, the request schema, and the schema of the 200 response."""
    options = {"num_predict": {"type": ["integer", "null"], "minimum": -2, "maximum": (1 << 31) - 1}, **sampling}
    asked: dict[str, Schema] = {
        "model": _TEXT_OR_NULL,
        "stream": _FLAG,
        "options": {"type": ["object", "null"], "properties": options},
        "format": {"oneOf": [{"type": "null"}, {"const": "json"}, {"type": "object", "properties": {}}]},
        "logprobs": _FLAG,
    }
    images: Schema = {"type": ["array", "null"], "items": _TEXT}  # in Base64
    message = message | {"properties": {**message["properties"], "images": images}}
    chat = {**asked, "messages": {"type": "array", "items": message}, "tools": tools}
    generate = {**asked, "images": images, "prompt": _TEXT_OR_NULL, "system": _TEXT_OR_NULL}
    done = {"model": _TEXT, "created_at": _TEXT, "done": {"type": "boolean"}}
    ok: Schema = {"type": "object", "properties": {"status": _TEXT}}
    shown: Schema = {"type": "object", "properties": {"details": {"type": "object"}}, "required": ["details"]}
    pull = {"type": "object", "properties": {"model": _TEXT, "stream": _FLAG}, "required": ["model"]}

    def answer(**more: Schema) -> Schema:
        return {"type": "object", "properties": {**done, **more}, "required": [*done, *more]}

    return {
        "/api/chat": (
            "The answer to a conversation, as Ollama's API has it.",
            {"type": "object", "properties": chat, "required": ["messages"]},
            answer(message={"type": "object"}),
        ),
        "/api/generate": (
            "The answer to a prompt, as Ollama's API has it.",
            {"type": "object", "properties": generate},
            answer(response=_TEXT),
        ),
        "/api/embed": (
            "Embeddings, as Ollama's API has them; 501 if the server has no model for them.",
            {"type": "object", "properties": {"model": _TEXT_OR_NULL, "input": {}, "truncate": _FLAG}},
            {"type": "object", "properties": {"embeddings": {"type": "array", "items": _NUMBERS}}},
        ),
        "/api/embeddings": (
            "The embedding of one text, as Ollama's API had it.",
            {"type": "object", "properties": {"model": _TEXT_OR_NULL, "prompt": _TEXT_OR_NULL}},
            {"type": "object", "properties": {"embedding": _NUMBERS}},
        ),
        "/api/pull": ("Success for the model that is here.", pull, ok),
        "/api/show": ("The model's details, as Ollama's API has them.", _NAMED, shown),
    }

"""GET /openapi.json: a machine-readable description of each path (OpenAPI 3.1).

The server ignores unlisted fields, so extra fields are allowed. null means absent.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import llmcl
from llmcl.sampling_options import PARAMETERS, Parameter
from llmcl.serve import ollama_schemas
from llmcl.serve.conversation import BUDGETS, OPENAI_ROLES
from llmcl.serve.embeddings import MAX_INPUTS
from llmcl.serve.errors import OLLAMA_PATH
from llmcl.serve.image_parts import DETAILS
from llmcl.serve.logprobs import MAX_TOP
from llmcl.serve.page import PREFIX
from llmcl.serve.sampling import MAX_ANSWERS, MAX_STOPS
from llmcl.serve.service import Service

Schema = dict[str, Any]

MAX_INT = (1 << 31) - 1


def _or_null(kind: str, **limits: Any) -> Schema:
    return {"type": [kind, "null"], **limits}


def _parameter(parameter: Parameter) -> Schema:
    low, high = parameter.http_range or (parameter.low, parameter.high)
    if parameter.kind is int:
        return _or_null("integer", minimum=int(parameter.http_limits[0]), maximum=min(high, (1 << 63) - 1))
    limits = {"exclusiveMinimum" if parameter.above else "minimum": low, "maximum": high}
    if parameter.off is None:
        return _or_null("number", **limits)
    return {"oneOf": [{"type": "null"}, {"const": parameter.off}, {"type": "number", **limits}]}


def _object(properties: dict[str, Schema], *required: str) -> Schema:
    return {"type": "object", "properties": properties, **({"required": [*required]} if required else {})}


def _list(items: Schema, **limits: Any) -> Schema:
    return {"type": "array", "items": items, **limits}


def _some(n: int, items: Schema) -> Schema:
    return _list(items, minItems=1, maxItems=n)


_TEXT, _WHOLE, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_ID: Schema = {"$ref": "#/components/schemas/TokenId"}
_FLAG = _or_null("boolean")
_COUNT: Schema = {"oneOf": [{"type": "null"}, {"const": -1}, {"type": "integer", "minimum": 1, "maximum": MAX_INT}]}
_STOPS = {"oneOf": [{"type": "null"}, _TEXT, _some(MAX_STOPS, _TEXT)]}
_SAMPLING: dict[str, Schema] = {
    **{(each.http_fields or (each.name,))[0]: _parameter(each) for each in PARAMETERS.values()},
    "dry_sequence_breakers": {
        "oneOf": [{"type": "null"}, _list({**_TEXT, "minLength": 1, "maxLength": 10}, maxItems=8)]
    },
    "ignore_eos": _FLAG,
    "min_tokens": _or_null("integer", minimum=0, maximum=MAX_INT),
    "stop_token_ids": {"oneOf": [{"type": "null"}, _list(_ID)]},
}
_LORAS = _list(_object({"id": {"oneOf": [_WHOLE, _TEXT]}, "scale": _NUMBER}, "id"))
_OPENAI: dict[str, Schema] = {
    **_SAMPLING,
    "lora": {"oneOf": [{"type": "null"}, _LORAS]},
    "model": _or_null("string"),
    "logit_bias": {"$ref": "#/components/schemas/LogitBias"},
    "stream": _FLAG,
}
_COMPLETION: dict[str, Schema] = {
    "stop": _STOPS,
    "n": {"$ref": "#/components/schemas/Answers"},
    "max_tokens": _COUNT,
    "stream_options": _or_null("object", properties={"include_usage": _FLAG}),
    "return_progress": _FLAG,
}


_SCHEMA: Schema = {"type": "object", "properties": {"type": {"enum": ["object", "string", "integer", "array"]}}}
_FUNCTION: dict[str, Schema] = {
    "name": {"type": "string", "pattern": "^[a-z]{1,9}$"},
    "description": _or_null("string"),
    "strict": _FLAG,
}
_MATCHED: dict[str, Schema] = {
    "json_schema": {"oneOf": [{"type": "null"}, _SCHEMA]},
    "grammar": _or_null("string", maxLength=100),
    "structured_outputs": _or_null(
        "object",
        properties={
            "json": {"oneOf": [{"type": "null"}, _SCHEMA]},
            "json_object": _FLAG,
            "regex": _or_null("string", maxLength=30),
            "choice": {"oneOf": [{"type": "null"}, _some(4, {**_TEXT, "minLength": 1})]},
            "grammar": _or_null("string", maxLength=100),
        },
    ),
}


def _format(**more: Schema) -> Schema:
    return _or_null("object", properties={"type": {"enum": ["text", "json_object", "json_schema"]}, **more})


def _tools(kind: str, parameters: str, *, nested: bool = False) -> Schema:
    described = {**_FUNCTION, parameters: {"oneOf": [{"type": "null"}, _SCHEMA]}}
    tool = _object(described, "name")
    inner = {"function": tool} if nested else described
    names = ("function",) if nested else ("name",)
    return {"oneOf": [{"type": "null"}, _list(_object({"type": {"enum": [kind]}, **inner}, *names), maxItems=3)]}


_ENDING: dict[str, Schema] = {"add_generation_prompt": _FLAG, "continue_final_message": _FLAG}
_VARIABLES = _or_null("object", properties={"enable_thinking": _FLAG})  # and any other template variable
_BUDGET_OF_THOUGHTS = {name: _or_null("integer", minimum=-1, maximum=MAX_INT) for name in BUDGETS}
_TOOL_USE: dict[str, Schema] = {
    "tool_choice": {"enum": [None, "none", "auto", "required"]},
    "parallel_tool_calls": _FLAG,
}


def _parts(*more: Schema) -> Schema:
    """Returns the schema of a text, or of parts. more: other kinds of parts than text."""
    part = _object({"type": {"const": "text"}, "text": _TEXT}, "type", "text")
    return {"oneOf": [_TEXT, _list({"oneOf": [part, *more]} if more else part)]}


_DETAIL = {"enum": [None, *DETAILS]}
_ADDRESS = _object({"url": _TEXT, "detail": _DETAIL}, "url")
_IMAGE_URL = _object({"type": {"const": "image_url"}, "image_url": _ADDRESS}, "type", "image_url")
_INPUT_IMAGE = _object({"type": {"const": "input_image"}, "image_url": _TEXT, "detail": _DETAIL}, "type", "image_url")
_SOURCES = (
    _object({"type": {"const": "base64"}, "media_type": _or_null("string"), "data": _TEXT}, "type", "data"),
    _object({"type": {"const": "url"}, "url": _TEXT}, "type", "url"),
)
_IMAGE = _object({"type": {"const": "image"}, "source": {"oneOf": [*_SOURCES]}}, "type", "source")
_MESSAGE = _object({"role": {"enum": [*OPENAI_ROLES]}, "content": _parts(_IMAGE_URL, _INPUT_IMAGE)}, "role", "content")
_MESSAGES = _list(_MESSAGE, minItems=1)
_ANTHROPIC_MESSAGE = _object({"role": {"enum": ["user", "assistant"]}, "content": _parts(_IMAGE)}, "role", "content")
_PROMPT = {"oneOf": [_TEXT, _some(MAX_ANSWERS, _TEXT), _list(_ID, minItems=1), _some(8, _list(_ID, minItems=1))]}
_ANTHROPIC = {"model": _or_null("string"), "system": {"oneOf": [{"type": "null"}, _parts()]}}

# Path -> summary, request schema, and schema of the 200 response (JSON; other media types are named).
_BODIES: dict[str, tuple[str, Schema, Schema]] = {
    "/v1/chat/completions": (
        "The answer to a conversation, as OpenAI's API has it.",
        _object(
            {
                **_OPENAI,
                **_COMPLETION,
                "messages": _MESSAGES,
                "max_completion_tokens": _COUNT,
                "logprobs": _FLAG,
                "top_logprobs": _or_null("integer", minimum=0, maximum=MAX_TOP),
                "chat_template_kwargs": _VARIABLES,
                **_ENDING,
                **_BUDGET_OF_THOUGHTS,
                "reasoning_effort": {"enum": [None, "none", "low", "medium", "high"]},
                "response_format": _format(json_schema=_object({"name": _TEXT, "schema": _SCHEMA}, "schema")),
                **_MATCHED,
                "tools": _tools("function", "parameters", nested=True),
                **_TOOL_USE,
            },
            "messages",
        ),
        _object({"id": _TEXT, "choices": _list(_object({"message": {"type": "object"}}, "message"))}, "id", "choices"),
    ),
    "/v1/completions": (
        "What follows a prompt, as OpenAI's API has it.",
        _object(
            {
                **_OPENAI,
                **_COMPLETION,
                **_MATCHED,
                "prompt": _PROMPT,
                "echo": _FLAG,
                "suffix": _or_null("string"),
                "logprobs": _or_null("integer", minimum=0, maximum=MAX_TOP),
            },
            "prompt",
        ),
        _object({"id": _TEXT, "choices": _list(_object({"text": _TEXT}, "text"))}, "id", "choices"),
    ),
    "/v1/responses": (
        "The answer to a conversation, as OpenAI's newer API has it.",
        _object(
            {
                **_OPENAI,
                "input": {"oneOf": [_TEXT, _MESSAGES]},
                "instructions": _or_null("string"),
                "store": _FLAG,
                "previous_response_id": _or_null("string"),
                "max_output_tokens": _COUNT,
                **_BUDGET_OF_THOUGHTS,
                "text": _or_null("object", properties={"format": _format(name=_TEXT, schema=_SCHEMA)}),
                "tools": _tools("function", "parameters"),
                **_TOOL_USE,
            },
            "input",
        ),
        _object({"id": _TEXT, "status": _TEXT, "output": _list({"type": "object"})}, "id", "status", "output"),
    ),
    "/v1/responses/compact": (
        "A conversation as its user messages and a summary, as Open Responses has it.",
        _object(
            {
                "model": _TEXT,
                "input": {"oneOf": [_TEXT, _MESSAGES]},
                "instructions": _or_null("string"),
                "previous_response_id": _or_null("string"),
            },
            "model",
            "input",
        ),
        _object({"id": _TEXT, "output": _list({"type": "object"}), "usage": {"type": "object"}}, "id", "output"),
    ),
    "/v1/messages": (
        "The answer to a conversation, as Anthropic's API has it.",
        _object(
            {
                **_SAMPLING,
                **_ANTHROPIC,
                "messages": _list(_ANTHROPIC_MESSAGE, minItems=1),
                "max_tokens": {"oneOf": _COUNT["oneOf"][1:]},
                "stop_sequences": _STOPS,
                "tools": _tools("custom", "input_schema"),
                "tool_choice": _or_null("object", properties={"type": {"enum": ["auto", "any", "none"]}}),
                "output_config": _or_null("object", properties={"format": _format(schema=_SCHEMA)}),
                "thinking": _or_null(
                    "object",
                    properties={
                        "type": {"enum": ["enabled", "disabled", "adaptive"]},
                        "budget_tokens": _or_null("integer", minimum=-1, maximum=MAX_INT),
                    },
                ),
                **_BUDGET_OF_THOUGHTS,
                "stream": _FLAG,
            },
            "messages",
            "max_tokens",
        ),
        _object({"id": _TEXT, "content": _list({"type": "object"}), "usage": {"type": "object"}}, "id", "content"),
    ),
    "/v1/messages/count_tokens": (
        "How many tokens the prompt of a conversation has.",
        _object({**_ANTHROPIC, "messages": _list(_ANTHROPIC_MESSAGE, minItems=1)}, "messages"),
        _object({"input_tokens": _WHOLE}, "input_tokens"),
    ),
    "/v1/embeddings": (
        "Embeddings of texts, as OpenAI's API has them; 501 if the server has no model for them.",
        _object(
            {
                "model": _or_null("string"),
                "input": {"oneOf": [_TEXT, _some(MAX_INPUTS, _TEXT), _list(_ID), _some(MAX_INPUTS, _list(_ID))]},
                "encoding_format": {"enum": [None, "float", "base64"]},
                "dimensions": _or_null("integer", minimum=1),
                "prompt_name": _or_null("string"),
                "truncate": _FLAG,
            },
            "input",
        ),
        _object({"data": _list(_object({})), "usage": {"type": "object"}}, "data", "usage"),
    ),
    "/v1/rerank": (
        "Documents by their relevance for a query, as Jina's API has it; 501 if the server has no reranker.",
        _object(
            {
                "model": _or_null("string"),
                "query": _TEXT,
                "documents": _some(MAX_INPUTS, {"oneOf": [_TEXT, _object({"text": _TEXT}, "text")]}),
                "top_n": _or_null("integer", minimum=1),
                "return_documents": _FLAG,
                "truncate": _FLAG,
            },
            "query",
            "documents",
        ),
        _object({"results": _list(_object({})), "usage": {"type": "object"}}, "results", "usage"),
    ),
    "/tokenize": (
        "A text as token ids.",
        _object({"content": _TEXT, "add_special": _FLAG, "with_pieces": _FLAG}, "content"),
        _object({"tokens": _list({"oneOf": [_WHOLE, _object({"id": _WHOLE, "piece": {}}, "id", "piece")]})}, "tokens"),
    ),
    "/lora-adapters": (
        "Scales of the adapters for requests that choose none, as llama-server has it.",
        _LORAS,
        _list(_object({"id": _WHOLE, "name": _TEXT, "path": _TEXT, "scale": _NUMBER}, "id", "path", "scale")),
    ),
    "/v1/load_lora_adapter": (
        "Load an adapter, as vLLM has it; 403 unless the server allows updates.",
        _object({"lora_name": _TEXT, "lora_path": _TEXT, "load_inplace": _FLAG}, "lora_name", "lora_path"),
        _TEXT,
    ),
    "/v1/unload_lora_adapter": (
        "Unload an adapter, as vLLM has it; 403 unless the server allows updates.",
        _object({"lora_name": _TEXT}, "lora_name"),
        _TEXT,
    ),
    "/detokenize": (
        "Token ids as text.",
        _object({"tokens": _list(_ID)}, "tokens"),
        _object({"content": _TEXT}, "content"),
    ),
    "/apply-template": (
        "A conversation as the text that the model reads.",
        _object({"messages": _MESSAGES, "chat_template_kwargs": _VARIABLES, **_ENDING}, "messages"),
        _object({"prompt": _TEXT}, "prompt"),
    ),
    "/infill": (
        "The text between a prefix and a suffix, as llama-server has it.",
        _object(
            {
                **_SAMPLING,
                **_MATCHED,
                "input_prefix": _TEXT,
                "input_suffix": _TEXT,
                "input_extra": {"oneOf": [{"type": "null"}, _list(_object({"filename": _TEXT, "text": _TEXT}))]},
                "prompt": _or_null("string"),
                "t_max_predict_ms": _or_null("integer", minimum=0, maximum=MAX_INT),
                "n_predict": {"oneOf": [{"const": 0}, *_COUNT["oneOf"]]},
                "stop": _STOPS,
                "stream": _FLAG,
            },
            "input_prefix",
            "input_suffix",
        ),
        _object({"content": _TEXT, "stop": {"type": "boolean"}}, "content", "stop"),
    ),
    **ollama_schemas.bodies(_SAMPLING, _MESSAGE, _tools("function", "parameters", nested=True)),
}
_PAGES: dict[str, tuple[str, str, Schema]] = {
    "/": ("A page for conversations.", "text/html", _TEXT),
    PREFIX + "{name}": ("A script or style sheet of the page.", "text/javascript text/css", _TEXT),
    "/health": ("Whether requests are answered.", "application/json", _object({"status": _TEXT}, "status")),
    "/metrics": ("Counters and histograms for Prometheus.", "text/plain", _TEXT),
    "/openapi.json": ("This description.", "application/json", _object({"paths": {"type": "object"}}, "paths")),
    "/lora-adapters": (
        "The adapters.",
        "application/json",
        _list(_object({"id": _WHOLE, "name": _TEXT}, "id", "name")),
    ),
    "/props": ("The model and what it is run with.", "application/json", _object({"model": _TEXT}, "model")),
    "/v1/models": ("The one model, as a list.", "application/json", _object({"data": _list(_object({}))}, "data")),
    "/v1/models/{name}": ("The model by its name.", "application/json", _object({"id": _TEXT}, "id")),
    "/v1/responses/{id}": ("A response that is kept.", "application/json", _object({"id": _TEXT}, "id")),
    "/v1/responses/{id}/input_items": (
        "What a response that is kept answered.",
        "application/json",
        _object({"data": _list({"type": "object"}), "has_more": {"type": "boolean"}}, "data", "has_more"),
    ),
    **ollama_schemas.PAGES,
}
_REFUSALS = {
    "400": "A field is wrong; the message names it.",
    "401": "No valid API key.",
    "403": "Another host or origin.",
    "404": "There is no such thing.",
    "408": "The body took too long.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "All places and the queue are taken; Retry-After says when to try again.",
    "500": "A defect, or the device failed.",
    "501": "Not implemented.",
    "503": "The model is not ready, or the server stops.",
}
_ERROR = _object({"error": _object({"message": _TEXT, "type": _TEXT}, "message", "type")}, "error")
_OLLAMA_ERROR = _object({"error": _TEXT}, "error")


def describe(vocab_size: int, most_answers: int) -> Schema:
    """Returns the whole description. most_answers: how many sequences may be under way."""
    bias = {"type": "number", "minimum": -100, "maximum": 100}
    first = {str(i): bias for i in range(min(vocab_size, 8))}  # listing all ids would slow fuzzers down
    schemas = {
        "TokenId": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1},
        "LogitBias": _or_null("object", properties=first, additionalProperties=bias),
        "Answers": _or_null("integer", minimum=1, maximum=min(MAX_ANSWERS, most_answers)),
    }
    paths: dict[str, Schema] = {}
    for path, (summary, media_types, schema) in _PAGES.items():
        answers = {media_type: {"schema": schema} for media_type in media_types.split()}
        paths[path] = {"get": {"summary": summary, "responses": _responses(path, answers)}}
        if (name := path.partition("{")[2].partition("}")[0]) != "":
            paths[path]["parameters"] = [{"name": name, "in": "path", "required": True, "schema": _TEXT}]
    forgotten = {"application/json": {"schema": _object({"id": _TEXT, "deleted": {"const": True}}, "id", "deleted")}}
    path = "/v1/responses/{id}"
    paths[path]["delete"] = {"summary": "Forgets a response.", "responses": _responses(path, forgotten)}
    for path, (summary, body, schema) in _BODIES.items():
        answers = {"text/plain" if schema is _TEXT else "application/json": {"schema": schema}}
        if "stream" in body.get("properties", ()):
            # Without a schema: some programs apply one to each event.
            answers[ollama_schemas.LINES if path.startswith(OLLAMA_PATH) else "text/event-stream"] = {"schema": {}}
        asked = {"required": True, "content": {"application/json": {"schema": body}}}
        responses = _responses(path, answers)
        paths.setdefault(path, {})["post"] = {"summary": summary, "requestBody": asked, "responses": responses}
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmcl serve", "version": llmcl.__version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _responses(path: str, answers: Schema) -> Schema:
    error = {"application/json": {"schema": _OLLAMA_ERROR if path.startswith(OLLAMA_PATH) else _ERROR}}
    refusals = {status: {"description": meaning, "content": error} for status, meaning in _REFUSALS.items()}
    return {"200": {"description": "Done.", "content": answers}, **refusals}


async def openapi(request: Request, service: Service) -> Response:
    """Returns the description, with the limits of the loaded model."""
    return JSONResponse(describe(service.served().vocab_size, service.settings.max_in_flight))

"""Reads the request fields that constrain the answer.

`response_format` is OpenAI's. `json_schema`, `grammar` and the `schema` inside a json_object are llama-server's.
`structured_outputs` and the older `guided_` names are vLLM's.
"""

from __future__ import annotations

import json
from typing import Any

from llmcl.serve.errors import RequestError
from llmcl.serve.fields import Fields, wrong
from llmcl.serve.served import Served

Found = tuple[str, dict[str, Any]]
"""The field to blame, and an option of `LLM.stream`."""

_OBJECT = {"type": "object"}
_VLLM = "json", "json_object", "regex", "choice", "grammar"


async def read_structure(fields: Fields, served: Served, format: Fields) -> dict[str, Any]:
    """Returns the option `schema`, `regex` or `grammar` of `LLM.stream` that the request asks for; empty: any text.

    format: the object with the answer's type, `response_format` or `text.format`. Raises RequestError for more than one
    constraint, and for a schema or grammar that is refused.
    """
    structures = [*_of_format(format), *_of_llama_server(fields), *_of_vllm(fields)]
    if not structures:
        return {}
    name, option = structures[0]
    if len(structures) > 1:
        message = f"{name}: {structures[1][0]} says as well what the answer is to match; give one of them"
        raise RequestError(400, message, name, "invalid_value")
    await served.check_structure(option, name)
    return option


def _of_format(format: Fields) -> list[Found]:
    kind = format.one_of("type", "text", "json_object", "json_schema")
    if kind == "json_object":
        schema = format.given("schema")
        return [(format.place, {"schema": _OBJECT if schema is None else format.object("schema").values})]
    if kind == "json_schema":
        holder = format if format.given("json_schema") is None else format.object("json_schema")
        holder.required("schema", "a JSON schema; for any JSON object give the type json_object")
        return [(holder.name("schema"), {"schema": holder.object("schema").values})]
    return []


def _of_llama_server(fields: Fields) -> list[Found]:
    structures: list[Found] = []
    if fields.given("json_schema") is not None:
        structures.append(("json_schema", {"schema": fields.object("json_schema").values}))
    if grammar := fields.text("grammar"):
        structures.append(("grammar", {"grammar": grammar}))
    return structures


def _of_vllm(fields: Fields) -> list[Found]:
    newer = fields.object("structured_outputs")
    structures = []
    for kind in _VLLM:
        for holder, name in (newer, kind), (fields, f"guided_{kind}"):
            if holder.given(name) not in (None, False):
                structures.append((holder.name(name), _option(holder, name, kind)))
    return structures


def _option(holder: Fields, name: str, kind: str) -> dict[str, Any]:
    if kind == "json":
        value = holder.given(name)
        return {"schema": value if isinstance(value, str) else holder.object(name).values}
    if kind == "json_object":
        return {"schema": _OBJECT} if holder.flag(name) else {}
    if kind == "choice":
        texts = holder.items(name)
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise wrong(holder.name(name), texts, "a list of texts, none of them empty")
        return {"grammar": "start: " + " | ".join(map(json.dumps, texts))}
    return {kind: holder.text(name)}

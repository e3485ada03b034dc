"""Cases whose subject is the server: raw bytes on its socket, and JSON bodies that follow its description or do not."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from fuzz.cases import Case
from fuzz.mutations import TEXTS, Draw, change_bytes, change_json, dump, json_values, numbers, shown
from fuzz.seeds import Folders
from hypothesis import strategies as st

_METHODS = ["GET", "POST", "POST", "POST", "OPTIONS", "HEAD", "PUT", "get", "", "\xff", "A" * 9000]
_PATHS = [
    "/",
    "*",
    "//",
    "/%00",
    "/%ff%fe",
    "/../../etc/passwd",
    "/v1/models/%2e%2e",
    "/" + "a" * 70_000,
    "http://[",
    "",
]
_HEADERS = [
    *("Host: 127.0.0.1", "Host: ", "Host: [::1]evil.com", "Host: 127.0.0.1:80@evil.com", "Host: a\tb", "Host: \xff"),
    *("Origin: http://[", "Origin: null", "Origin: ", "Origin: http://127.0.0.1\r\nOrigin: http://evil.com"),
    *("Content-Length: -1", "Content-Length: 1e9", "Content-Length: 99999999999999999999", "Content-Length: 5"),
    *(
        "Transfer-Encoding: chunked",
        "Transfer-Encoding: gzip, chunked",
        "Content-Type: text/plain",
        "Content-Type: \xff",
    ),
    *(
        "Content-Encoding: gzip",
        "Accept: \xff",
        "Authorization: Bearer \xff",
        "Authorization: Basic ====",
        "x-api-key: ",
    ),
    *("Expect: 100-continue", "Upgrade: websocket\r\nConnection: upgrade", "Connection: close", "Range: bytes=9-1"),
    *("X: " + "a" * 70_000, "no colon", ": no name", " folded", "a b: c", "X:\0", "Cookie: " + "a=b; " * 900),
]


@cache
def _description() -> Any:
    from llmcl.serve.openapi import describe

    return describe(258, 8)


@cache
def _bodies() -> dict[str, Any]:
    """The schema of the body of each path that takes one."""
    posts = {path: methods["post"] for path, methods in _description()["paths"].items() if "post" in methods}
    return {path: post["requestBody"]["content"]["application/json"]["schema"] for path, post in posts.items()}


@st.composite
def body_cases(draw: Draw, folders: Folders) -> Case:
    """A body by the schema, changed at up to three places, or something else."""
    path = draw(st.sampled_from(sorted(_bodies())))
    body = _by_schema(draw, _bodies()[path], 0)
    notes = [f"POST {path}"]
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 3]))):
        if isinstance(body, dict):
            notes.append(change_json(draw, body, {}))
    if draw(st.integers(0, 19)) == 0:
        body = draw(json_values)
        notes.append(f"another body: {shown(body)}")
    if isinstance(body, dict) and "max_tokens" in body:
        body["max_tokens"] = draw(st.sampled_from([1, 2, 5, body["max_tokens"]]))
    data = dump(body)
    if draw(st.integers(0, 9)) == 0:
        data, note = change_bytes(draw, data)
        notes.append(note)
    return _post(path, data, notes)


@st.composite
def http_cases(draw: Draw, folders: Folders) -> Case:
    """A request of odd parts, or a sound one with changed bytes."""
    method, version = draw(st.sampled_from(_METHODS)), draw(st.sampled_from(["1.1", "1.1", "1.0", "9.9", "", "\xff"]))
    path = draw(st.sampled_from([*_PATHS, *sorted(_description()["paths"])]))
    headers = draw(st.lists(st.sampled_from(_HEADERS), max_size=4))
    if draw(st.integers(0, 2)) == 0:  # a sound request with one odd header
        method, path, version, headers = "GET", draw(st.sampled_from(["/", "/health", "/props"])), "1.1", headers[:1]
    if draw(st.integers(0, 3)):
        headers.insert(0, "Host: 127.0.0.1")
    body = draw(
        st.sampled_from([b"", b"{}", b"5\r\nhello\r\n0\r\n\r\n", b"ffffffffffffffffff\r\n", b"\xff" * 300, b"-1\r\n"])
    )
    end = draw(st.sampled_from(["\r\n", "\r\n", "\r\n", "\n", "\r"]))
    lines = [f"{method} {path} HTTP/{version}", *headers, "", ""]
    data = end.join(lines).encode("latin-1") + body
    notes = [f"{method[:20]} {path[:40]} {shown(headers)}"]
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        data, note = change_bytes(draw, data)
        notes.append(note)
    return Case("http", notes, {}, {"data": data.decode("latin-1"), "whole": False})


def _post(path: str, body: bytes, notes: list[str]) -> Case:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    return Case("body", notes, {}, {"data": data.decode("latin-1"), "whole": True})


def _by_schema(draw: Draw, schema: Any, depth: int) -> Any:
    """A value that the schema allows, or nearly."""
    if reference := schema.get("$ref"):
        return _by_schema(draw, _description()["components"]["schemas"][reference.rpartition("/")[2]], depth)
    for some in ("anyOf", "oneOf", "enum"):
        if some in schema:
            one = draw(st.sampled_from(schema[some]))
            return one if some == "enum" else _by_schema(draw, one, depth)
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type", "object" if "properties" in schema else None)
    kind = draw(st.sampled_from(kind)) if isinstance(kind, list) else kind
    if kind == "object":
        properties, required = schema.get("properties", {}), schema.get("required", [])
        optional = [name for name in properties if name not in required]
        chosen = draw(st.lists(st.sampled_from(optional), max_size=4, unique=True)) if optional else []
        return {name: _by_schema(draw, properties[name], depth + 1) for name in [*required, *chosen]}
    if kind == "array":
        least = schema.get("minItems", 0)
        n_items = max(least, draw(st.integers(0, 3)) if depth < 5 else 0)
        return [_by_schema(draw, schema.get("items", {}), depth + 1) for _ in range(n_items)]
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", 0), schema.get("maximum", 300)
        return draw(st.sampled_from([low, high, (low + high) / 2 if kind == "number" else (low + high) // 2]) | numbers)
    if kind == "string":
        return draw(st.sampled_from(["Hello", "a", "auto", *TEXTS]))
    return {"boolean": draw(st.booleans()), "null": None}.get(str(kind), draw(json_values))


def sound() -> Case:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    return _post("/v1/chat/completions", json.dumps(body).encode(), [])

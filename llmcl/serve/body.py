"""Reads the request body: JSON, within limits of size and time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anyio
from starlette.requests import ClientDisconnect, Request

from llmcl.errors import shown
from llmcl.serve.by_hand import Begun
from llmcl.serve.errors import RequestError
from llmcl.serve.fields import Fields
from llmcl.serve.settings import Settings

_LARGE_BYTES = 64 << 10  # parsed in a thread, so other requests' tokens keep flowing
# The JSON parser holds the GIL: a body at these limits takes up to 0.1 s.
MAX_ELEMENTS = 1 << 18  # values; keys are counted separately
MAX_KEYS = 1 << 16


async def read_fields(request: Request, settings: Settings, *, takes_images: bool = False) -> Fields:
    """Reads the JSON object in the request body. Raises RequestError for any other JSON and for a body that is too
    large or too slow.
    """
    return await parse_fields(await read_body(request, settings, takes_images=takes_images))


async def read_items(request: Request, settings: Settings) -> list[Any]:
    """Reads a JSON list in the request body. Raises the errors of `read_fields`."""
    items = _parse(await read_body(request, settings))
    if not isinstance(items, list):
        raise RequestError(400, f"the body: got {shown(items)}, expected a list", code="invalid_value")
    return items


async def parse_fields(data: bytes) -> Fields:
    """Parses a request body. Raises RequestError unless it is a JSON object."""
    if len(data) < _LARGE_BYTES:
        return Fields(_parse(data))
    return Fields(await asyncio.to_thread(_parse, data))


async def read_body(request: Request, settings: Settings, *, takes_images: bool = False) -> bytes:
    """Reads the request body. Raises RequestError if it is too large or too slow."""
    most = max(settings.max_body_bytes, settings.max_image_body_bytes) if takes_images else settings.max_body_bytes
    reading = Begun(_read(request, most))
    if not reading.is_over:
        try:
            with anyio.fail_after(settings.body_s):  # wait_for would create a task
                await reading
        except TimeoutError:
            message = f"the body did not arrive within {settings.body_s:g} s"
            raise RequestError(408, message, code="request_timeout", closes=True) from None
    return reading.result


async def _read(request: Request, most: int) -> bytes:
    length = b"0"
    for name, value in request.scope["headers"]:
        if name == b"content-length":
            length = value
        elif name == b"content-encoding" and value.lower() != b"identity":
            coding = shown(value.decode("latin-1"))
            refusal = f"content-encoding: got {coding}, expected none; send the body as it is"
            raise RequestError(415, refusal, code="unsupported_encoding", closes=True)
    if not length.isdigit() or int(length[:20]) > most:
        raise _too_large(most)
    data, goes_on = bytearray(), True
    while goes_on:  # like `request.stream`, with fewer steps
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        data += message.get("body", b"")
        goes_on = message.get("more_body", False)
        if len(data) > most:
            raise _too_large(most)
    return bytes(data)


def _too_large(most: int) -> RequestError:
    return RequestError(413, f"the body has more than {most} bytes", code="request_too_large", closes=True)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)  # json.loads would create a decoder for each call


def _parse(data: bytes) -> Any:
    try:
        text = data.decode(json.detect_encoding(data), "surrogatepass")
        if len(data) >= _LARGE_BYTES:
            _check_size(text)
        return _DECODER.decode(text)
    except RecursionError:
        raise RequestError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON: {error}", code="invalid_json") from None


def _check_size(text: str) -> None:
    """Raises RequestError for JSON with too many keys or values. Counts them without parsing."""
    if not _has_many([text]):
        return
    bare = text.replace("\\\\", "").replace('\\"', "")
    if bare.count('"') > 2 * (MAX_KEYS + MAX_ELEMENTS) or _has_many(bare.split('"')[::2]):
        message = f"the body has more than {MAX_KEYS} keys or {MAX_ELEMENTS} values; send it in parts"
        raise RequestError(413, message, code="request_too_large")


def _has_many(texts: list[str]) -> bool:
    """Returns whether the texts exceed the limits for keys or values. Characters inside strings count as well."""
    n_keys = sum(text.count(":") for text in texts)
    n_values = sum(text.count(",") + text.count("[") + text.count("{") for text in texts)
    return n_keys > MAX_KEYS or n_values > MAX_ELEMENTS

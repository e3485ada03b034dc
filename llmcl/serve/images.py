"""Reads the images of a conversation: their bytes, as pictures, prepared for the model."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from llmcl.errors import ContextLengthError, UsageError, one_line
from llmcl.serve.errors import RequestError, unsupported
from llmcl.serve.image_parts import images_of
from llmcl.serve.remote_images import FetchError, fetch
from llmcl.serve.served import Served
from llmcl.serve.service import Service

if TYPE_CHECKING:  # imported late: needs Pillow
    from llmcl.vision.image_reader import ImageReader
    from llmcl.vision.vision import Pixels

_DATA = "data:"
MAX_IMAGES = 100  # of a request, as at Anthropic
_PREPARING = ThreadPoolExecutor(2, "preparing images")


async def load_images(
    request: Request, service: Service, served: Served, messages: Sequence[dict[str, Any]]
) -> list[Pixels]:
    """Returns the images of a conversation, in order. Fetched images replace their addresses in `messages`.

    Works in threads, and ends when the client leaves. Raises RequestError that names the faulty image.
    """
    parts = [*images_of(messages)]
    if not parts:
        return []
    check_vision(served, messages)
    assert served.images is not None
    if len(parts) > MAX_IMAGES:
        message = f"the conversation has {len(parts)} images, expected at most {MAX_IMAGES}"
        raise RequestError(400, message, parts[MAX_IMAGES]["place"], "invalid_image")
    loading = _load(parts, served, served.images, service.settings.image_hosts)
    return await service.count(request, loading, "images", "prepared")


def check_vision(served: Served, messages: Sequence[dict[str, Any]]) -> None:
    """Raises RequestError for images if the model takes none."""
    part = next(images_of(messages), None)
    if part is not None and not served.takes_images:
        raise unsupported(part["place"], f"{served.name} takes no images (it has no vision encoder here)")


async def _load(
    parts: Sequence[dict[str, Any]], served: Served, reader: ImageReader, hosts: Sequence[str]
) -> list[Pixels]:
    loop, loaded, n_tokens = asyncio.get_running_loop(), list[Any](), 0
    for part in parts:
        try:
            if not part["url"].startswith(_DATA):
                data = await fetch(part["url"], hosts)
                part["url"] = f"{_DATA};base64,{base64.b64encode(data).decode('ascii')}"  # is not fetched again
            pixels = await loop.run_in_executor(_PREPARING, _pixels, part["url"], reader)
        except (FetchError, UsageError) as error:
            raise RequestError(400, f"{part['place']}: {error}", part["place"], "invalid_image") from None
        n_tokens += pixels.text.count(reader.vision.processor.image_token)
        if n_tokens > served.max_context:  # more images would only fill the memory
            size = f"at least {n_tokens} tokens"
            raise ContextLengthError.with_size(size, f"the images have {size}, the context {served.max_context} tokens")
        loaded.append(pixels)
    return loaded


def _pixels(url: str, reader: ImageReader) -> Pixels:
    return reader.pixels(_bytes_of(url))


def _bytes_of(url: str) -> bytes:
    """Returns the bytes of a data URL, RFC 2397. The declared type is not looked at: the bytes tell it."""
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise UsageError(f"got {one_line(url, 40)}, expected a data URL such as data:image/png;base64,iVBORw0...")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError):
        raise UsageError("the data is not Base64; send the file's bytes in Base64") from None

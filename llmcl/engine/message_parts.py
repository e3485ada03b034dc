"""Content parts in prompts and messages: texts and images in order, as OpenAI and transformers write them."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmcl.errors import LlmclError, UsageError, check_text, one_line, shown

Picture = str | os.PathLike[str] | bytes | bytearray | memoryview | Any
"""A picture from a caller: a path, a file's bytes or a Pillow picture (a type that only callers with images import)."""

Content = str | list[dict[str, Any]]
"""A message's content: a text, or parts."""

_IMAGE = {"type": "image"}  # as chat templates see an image
_STARTS = {"jpeg": b"\xff\xd8", "gif": b"GIF8", "bmp": b"BM", "webp": b"RIFF"}  # the others are sent as PNG
_SOURCES = "image", "path", "bytes", "base64", "url"


def content_with(text: str | Sequence[Any], images: Sequence[Any] | None) -> Content:
    """Returns a message's content: a text, or the images and then the text or parts."""
    parts: list[Any] = [*text] if isinstance(text, (list, tuple)) and are_parts(text) else [text]
    if parts == [text]:
        check_text("text", text)
        if images is None:
            return str(text)
    pictures = [{"type": "image", "image": image} for image in picture_list(images)]
    return [*pictures, *({"type": "text", "text": part} if isinstance(part, str) else part for part in parts)]


def are_parts(prompt: Sequence[Any]) -> bool:
    """Returns whether a list is the content of one message: texts and parts, at least one of them a part."""
    return any(isinstance(part, Mapping) and "type" in part and "role" not in part for part in prompt)


def holds_images(messages: Sequence[Any]) -> bool:
    """Returns whether a message has an image among its parts."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, (list, tuple)) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") in ("image", "image_url") for part in parts)


def picture_list(images: object) -> list[Picture]:
    """Returns the argument `images` as a list. Raises UsageError for another type."""
    if images is None:
        return []
    if isinstance(images, (str, bytes, bytearray, memoryview)) or not isinstance(images, Sequence):
        raise UsageError(f"images is {shown(images)}; expected a list of paths, bytes or Pillow pictures")
    return [*images]


def without_images(prompt: str | Sequence[Any], images: Sequence[Any] | None) -> tuple[list[dict[str, Any]], list[Any]]:
    """Returns messages in which images are bare parts, and the images in order: paths, bytes or Pillow pictures.

    prompt: text, parts or messages. images: the pictures for parts without one, or in front of a text.
    """
    rest = picture_list(images)
    n_given = len(rest)
    messages: list[Any]
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": [*(_IMAGE for _ in rest), prompt]}]
    else:
        messages = [{"role": "user", "content": [*prompt]}] if are_parts(prompt) else [*prompt]
    sources: list[Any] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), (list, tuple)):
            continue
        content = [_part(part, sources, rest) for part in message["content"]]
        messages[i] = {**message, "content": content}
    if rest:
        raise UsageError(
            f"images has {n_given}, the messages have {n_given - len(rest)} parts without a picture; expected a part "
            '{"type": "image"} for each'
        )
    return messages, sources


def rendered_with_images(
    messages: list[dict[str, Any]], marker: str, render: Callable[[list[dict[str, Any]]], str]
) -> str:
    """Renders messages with images. A template for texts alone refuses parts, or leaves images out: it gets markers."""
    try:
        text = render(messages)
    except LlmclError:
        text = ""
    return text if marker in text else render(flat(messages, marker))


def flat(messages: Sequence[Mapping[str, Any]], marker: str) -> list[dict[str, Any]]:
    """Returns messages whose content is text, with markers for images: for templates that know no parts."""
    return [
        {**message, "content": flat_content(message["content"], marker, "\n")} if "content" in message else {**message}
        for message in messages
    ]


def flat_content(content: Any, marker: str, between: str = "") -> Any:
    """Returns the text of content parts, with markers for images."""
    if not isinstance(content, list):
        return content
    return between.join(marker if part["type"] == "image" else str(part.get("text", "")) for part in content)


def text_of(content: Content) -> str:
    """Returns a message's content as a line for people."""
    return str(flat_content(content, "[image]", " "))


def for_server(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns messages with images as data URLs, as OpenAI's API takes them. Raises UsageError for a missing file."""
    return [
        {**message, "content": [_sendable(part) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def _sendable(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if part["type"] != "image":
        return part
    source = _source(part, [], "the image")
    try:
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
    except OSError as error:
        raise UsageError(f"image file {shown(str(source))} cannot be read ({error.strerror})") from None
    kind = next((name for name, start in _STARTS.items() if data.startswith(start)), "png")
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"}}


def texts_in(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the texts in messages."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from (part["text"] for part in content if isinstance(part.get("text"), str))


def _part(part: Any, sources: list[Any], rest: list[Any]) -> dict[str, Any]:
    """Returns a part for the template, and appends an image's source."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise UsageError(f'a part of a message is {shown(part)}; expected a text or {{"type": ..., ...}}')
    if part["type"] not in ("image", "image_url"):
        if part["type"] == "text":
            check_text("the text of a message's part", part.get("text"))
        return dict(part)
    sources.append(_source(part, rest, f"image {len(sources) + 1}"))
    return dict(_IMAGE)


def _source(part: Mapping[str, Any], rest: list[Any], name: str) -> Any:
    """Returns the path, bytes or Pillow picture in an image's part, or the next one of `rest`."""
    if part["type"] == "image_url":
        address = part.get("image_url")
        part = {"url": address.get("url") if isinstance(address, Mapping) else address}
    there = [key for key in _SOURCES if part.get(key) is not None]
    if not there and rest:
        return rest.pop(0)
    if len(there) != 1:
        problem = f"has {' and '.join(there)}" if there else "has no picture"
        raise UsageError(f"{name} {problem}; expected one of {', '.join(_SOURCES)}")
    key, value = there[0], part[there[0]]
    if key == "url" or (key == "image" and isinstance(value, str) and value[:5].lower() == "data:"):
        return data_url_bytes(value, name)
    return base64_bytes(value, name) if key == "base64" else value


def data_url_bytes(url: object, name: str) -> bytes:
    """Returns the bytes in a `data:` URL. Raises UsageError for other addresses and damaged base64."""
    head, comma, body = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not head.lower().startswith("data:"):
        raise UsageError(f"{name} is {shown(url)}; expected a data: URL, or a path (remote addresses are not fetched)")
    if not comma or not head.lower().endswith(";base64"):
        raise UsageError(f"{name} is {shown(url)}; expected data:image/png;base64,... or another type")
    return base64_bytes(body, name)


def base64_bytes(text: object, name: str) -> bytes:
    """Decodes base64; line breaks are allowed. Raises UsageError for damaged base64."""
    check_text(f"base64 of {name}", text)
    try:
        return base64.b64decode("".join(str(text).split()), validate=True)
    except ValueError as error:  # characters outside ASCII, too
        raise UsageError(f"{name} is no base64 ({one_line(error)}); expected an encoded picture file") from None

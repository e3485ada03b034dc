"""Images in messages: the content parts of each API, and the parts that chat templates take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llmcl.errors import shown
from llmcl.serve.errors import unsupported
from llmcl.serve.fields import Fields, wrong

OPENAI_IMAGES = "image_url", "input_image"  # part types in chat completions and in responses
ANTHROPIC_IMAGES = ("image",)
DETAILS = "auto", "low", "high", "original"  # accepted; the model's own processor decides on the size
_TOOL_ROLES = "tool", "function"
Content = str | list[dict[str, Any]]
"""A message's text, or its parts if it has images: `{"type": "text", "text": ...}` and `image_part`."""


def image_part(url: str, place: str) -> dict[str, Any]:
    """Returns the part for an image. url: a data URL or an address. place: where it stands in the request."""
    return {"type": "image", "url": url, "place": place}


def read_image(part: Fields) -> dict[str, Any]:
    """Reads a part with an image, in the form of any of the APIs."""
    if part.given("type") in ANTHROPIC_IMAGES:
        return image_part(_anthropic_url(part.object("source")), part.place)
    if part.given("file_id") is not None:
        raise unsupported(part.name("file_id"), "files that are kept at the server are not supported")
    url: Any = part.required("image_url", "a data URL")
    part.one_of("detail", *DETAILS)
    name = part.name("image_url")
    if isinstance(url, dict):
        image = part.object("image_url")
        image.one_of("detail", *DETAILS)
        url, name = image.required("url", "a data URL"), image.name("url")
    if not isinstance(url, str):
        raise wrong(name, url, "a data URL")
    return image_part(url, part.place)


def _anthropic_url(source: Fields) -> str:
    kind = source.required("type", "base64 or url")
    if kind == "url":
        return _required_text(source, "url", "an address")
    if kind != "base64":
        raise unsupported(source.name("type"), f"sources of type {shown(kind)} are not supported, base64 and url are")
    return f"data:{source.text('media_type') or ''};base64,{_required_text(source, 'data', 'an image in Base64')}"


def _required_text(fields: Fields, field: str, expected: str) -> str:
    value = fields.required(field, expected)
    if not isinstance(value, str):
        raise wrong(fields.name(field), value, expected)
    return value


def with_ollama_images(content: str, fields: Fields) -> Content:
    """Adds the images of the field `images`, in Base64, before a text."""
    images = []
    for index, image in enumerate(fields.items("images")):
        place = f"{fields.name('images')}[{index}]"
        if not isinstance(image, str):
            raise wrong(place, image, "an image in Base64")
        images.append(image_part(image if image.startswith("data:") else f"data:;base64,{image}", place))
    return [*images, *as_parts(content)] if images else content


def as_parts(content: Content) -> list[dict[str, Any]]:
    """Returns the parts of a content; an empty text has none."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


def joined(first: Content, second: Content) -> Content:
    """Returns two contents, with an empty line between their texts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    before, behind = as_parts(first), as_parts(second)
    if before and behind and before[-1]["type"] == behind[0]["type"] == "text":
        middle = {"type": "text", "text": f"{before[-1]['text']}\n\n{behind[0]['text']}"}
        return [*before[:-1], middle, *behind[1:]]
    return [*before, *behind]


def images_of(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the parts with images, in order."""
    for message in messages:
        if isinstance(content := message.get("content"), list):
            yield from (part for part in content if part["type"] == "image")


def for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without the bytes of its images."""
    if not isinstance(content := message.get("content"), list):
        return message
    return message | {"content": [{"type": "image"} if part["type"] == "image" else part for part in content]}


def results_as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Moves images from tool results to the user message behind them: chat templates take images there."""
    if not any(message["role"] in _TOOL_ROLES and isinstance(message["content"], list) for message in messages):
        return messages
    moved: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    for message in [*messages, None]:
        if images and (message is None or message["role"] not in _TOOL_ROLES):
            if message is not None and message["role"] == "user":
                message = message | {"content": [*images, *as_parts(message["content"])]}
            else:
                moved.append({"role": "user", "content": images})
            images = []
        if message is None:
            break
        if message["role"] in _TOOL_ROLES and isinstance(content := message["content"], list):
            images += images_of([message])
            message = message | {"content": "\n".join(part["text"] for part in content if part["type"] == "text")}
        moved.append(message)
    return moved

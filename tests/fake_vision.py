"""A vision tower without a device: an image of w x h pixels becomes rows for w x h tokens."""

from __future__ import annotations

from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import numpy as np
from ascii_tokenizer import ascii_tokenizer
from PIL import Image
from tokenizers import AddedToken

from llmcl.models.image_rows import ImageRows
from llmcl.tokenizer import Tokenizer
from llmcl.vision.vision import Pixels, Vision

MARKER, TOKEN = "<start_of_image>", "<image_soft_token>"  # Gemma 3's
# The loop over parts that templates of Gemma 3, SmolVLM and Qwen-VL have.
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + MARKER + "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)


class FakeProcessor:
    marker, image_token = MARKER, TOKEN

    def pixels(self, picture: Image.Image) -> Pixels:
        values = np.asarray(picture, dtype=np.float32)
        width, height = picture.size
        digest = sha256(values.tobytes() + bytes(picture.size)).digest()
        return Pixels(values, [(height, width)], f"[{TOKEN * (width * height)}]", digest)


class FakeTower:
    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def rows(self, pixels: Pixels) -> list[ImageRows]:
        self.seen.append(pixels.values.shape)
        buffer: Any = SimpleNamespace(nbytes=pixels.values.nbytes)
        return [ImageRows(buffer, rows * columns, pixels.digest, (rows, columns)) for rows, columns in pixels.grids]


def fake_vision() -> Vision:
    return Vision(FakeProcessor(), FakeTower())


def image_tokenizer(template: str | None = TEMPLATE, *, with_token: bool = True) -> Tokenizer:
    """Single characters, and Gemma 3's tokens for images."""
    backend = ascii_tokenizer()
    extra = [MARKER, TOKEN] if with_token else [MARKER, "<pad>"]
    backend.add_special_tokens([AddedToken(token, special=True) for token in extra])
    return Tokenizer(backend, vocab_size=110, bos_token_id=1, prepends_bos=True, chat_template=template)

"""A server whose model takes images: it answers with the sizes and places of the pictures that it got."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_server import IMAGE_TEMPLATE, FakeEngine, Running, byte_tokenizer, running, served
from PIL import Image

from llmcl.models.image_rows import ImageRows, PlacedImage
from llmcl.vision.image_reader import ImageReader
from llmcl.vision.vision import Pixels, Vision


class FakeProcessor:
    """An image has two tokens, between a bracket each."""

    marker = "<picture>"
    image_token = "<img>"

    def pixels(self, picture: Image.Image) -> Pixels:
        values = np.asarray(picture, np.float32)
        return Pixels(values, [(1, 2)], "(<img><img>)", hashlib.sha256(values.tobytes()).digest())


class FakeTower:
    """ran: the sizes of the pictures whose rows it made."""

    def __init__(self) -> None:
        self.ran: list[tuple[int, int]] = []

    def rows(self, pixels: Pixels) -> list[ImageRows]:
        height, width, _ = pixels.values.shape
        self.ran.append((width, height))
        buffer: Any = SimpleNamespace(nbytes=8, size=(width, height))
        return [ImageRows(buffer, 2, pixels.digest)]


class ImageEngine(FakeEngine):
    def __init__(self, template: str = IMAGE_TEMPLATE, token: str = "<img>"):
        super().__init__(byte_tokenizer(template, added=[token]))
        self.tower = FakeTower()

    def images(self) -> list[tuple[int, int]]:
        """Width and height of each picture of the last request, as they stand in its prompt."""
        return [placed.image.rows.size for placed in self.placed()]

    def placed(self) -> Sequence[PlacedImage]:
        images: Sequence[PlacedImage] = self.asked[-1][1].get("images", ())
        return images


@contextmanager
def image_server(template: str = IMAGE_TEMPLATE, token: str = "<img>", **settings: Any) -> Iterator[Running]:
    engine = ImageEngine(template, token)
    with running(engine, loaded=False, **settings) as server:
        server.service.ready(served(engine, images=ImageReader(Vision(FakeProcessor(), engine.tower))))
        yield server


def picture(width: int = 3, height: int = 2, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, kind)
    return file.getvalue()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{encoded(data)}"

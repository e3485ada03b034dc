"""Images in a text: rows that stand in place of the embeddings of their tokens."""

from __future__ import annotations

from dataclasses import dataclass

from llmcl.runtime.device import Buffer


@dataclass(frozen=True, eq=False)
class ImageRows:
    """An image, or a tile of one, as the model reads it. Its tokens follow one another in the text.

    Source: the output of a vision tower after its projector.
    """

    rows: Buffer  # float32 [n, hidden] on the model's device
    n: int
    digest: bytes  # of the pixels and of how they were prepared; equal digests have equal rows
    grid: tuple[int, int] | None = None  # rows and columns, for rotary positions on several axes; None: as text
    deepstack: tuple[Buffer, ...] = ()  # float32 [n, hidden] each, added after the first layers (Qwen3-VL)


@dataclass(frozen=True, eq=False)
class PlacedImage:
    """An image at its place in a text."""

    first: int  # index of its first token in the text
    image: ImageRows

    @property
    def end(self) -> int:
        return self.first + self.image.n

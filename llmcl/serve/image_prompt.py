"""The prompt of a conversation with images: its token ids, and where the images stand in them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from llmcl.errors import UsageError, shown

if TYPE_CHECKING:  # imported late: the server listens before the engine is loaded
    from llmcl.models.image_rows import PlacedImage
    from llmcl.tokenizer import Tokenizer
    from llmcl.vision.image_reader import ImageReader
    from llmcl.vision.vision import Pixels, Processor


class ImagePrompt(NamedTuple):
    """A prompt and its images, in order."""

    ids: list[int]
    images: Sequence[PlacedImage]
    places: Sequence[tuple[Pixels, list[int]]] = ()  # prepared images, with the indices of their tokens

    def with_rows(self, reader: ImageReader) -> ImagePrompt:
        """Returns the prompt with the images as the model reads them."""
        from llmcl.models.image_rows import PlacedImage

        images = []
        for pixels, places in self.places:
            at = 0
            for rows in reader.rows(pixels):
                images.append(PlacedImage(places[at], rows))
                at += rows.n
        return ImagePrompt(self.ids, images)


@dataclass(frozen=True)
class ImageWriter:
    """Writes the prompt of a conversation with images.

    A user's text may hold the same characters as a marker or an image token. Secret words stand for them while the
    template runs, so an image keeps its place whatever the text says.
    """

    processor: Processor
    marker: str  # the secret words
    token: str

    @staticmethod
    def of(processor: Processor) -> ImageWriter:
        return ImageWriter(processor, secrets.token_hex(16), secrets.token_hex(16))

    def hidden(self, value: Any) -> Any:
        """Returns messages or tools with the secret words in place of markers and image tokens."""
        text = json.dumps(value)
        for plain, secret in (self.processor.marker, self.marker), (self.processor.image_token, self.token):
            text = text.replace(json.dumps(plain)[1:-1], secret)
        return json.loads(text)

    def prompt(self, rendered: str, pixels: Sequence[Pixels], tokenizer: Tokenizer) -> ImagePrompt:
        """Returns the prompt for what the template has rendered."""
        from llmcl.vision.vision import token_in_text

        token = self.processor.image_token
        stand_in, image_id = token_in_text(self.processor, tokenizer)
        between = [self._restored(text) for text in rendered.split(self.processor.marker)]
        if (n_shown := len(between) - 1) != len(pixels):
            raise UsageError(
                f"the chat template shows {n_shown} of {len(pixels)} images; send them in messages of the user"
            )
        texts = [image.text.replace(token, stand_in) for image in pixels]
        text = between[0] + "".join(image + rest for image, rest in zip(texts, between[1:], strict=True))
        ids = tokenizer.encode(text, False)
        all_places = iter([place for place, each in enumerate(ids) if each == image_id])
        if ids.count(image_id) != text.count(stand_in):
            raise UsageError(f"the text beside the images makes other tokens of {shown(stand_in)}; leave it out")
        images = []
        for image, before in zip(pixels, between[:-1], strict=True):
            for _ in range(before.count(stand_in)):  # the user's text
                next(all_places)
            images.append((image, [next(all_places) for _ in range(image.text.count(token))]))
        return ImagePrompt(ids, [], images)

    def _restored(self, text: str) -> str:
        return text.replace(self.marker, self.processor.marker).replace(self.token, self.processor.image_token)

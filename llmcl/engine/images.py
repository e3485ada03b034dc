"""The hook for images: what prompts ask of `llmcl/vision/`, which nothing else here imports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import TYPE_CHECKING

from llmcl.checkpoint import Checkpoint, open_checkpoint, resolve
from llmcl.checkpoint.mmproj import find_mmproj
from llmcl.engine.message_parts import Picture
from llmcl.errors import ContextLengthError, UsageError, counted, shown
from llmcl.models.image_rows import PlacedImage
from llmcl.progress import LOADING_TOWER, Progress
from llmcl.runtime import driver_calls
from llmcl.runtime.device import Device

if TYPE_CHECKING:
    from llmcl.tokenizer import Tokenizer
    from llmcl.vision.image_reader import ImageReader
    from llmcl.vision.vision import Vision


class PromptWithImages(list[int]):
    """Token ids with the images in them. A copy or a slice is a plain list, without the images."""

    def __init__(self, ids: Sequence[int], images: Sequence[PlacedImage]):
        super().__init__(ids)
        self.images = tuple(images)


def images_of(prompt: Sequence[int]) -> tuple[PlacedImage, ...]:
    """Returns the images in a prompt from `PromptReader.encode`; () for plain token ids."""
    return prompt.images if isinstance(prompt, PromptWithImages) else ()


def placed_images(images: Sequence[object]) -> list[PlacedImage]:
    """Returns the images for a prompt of token ids. Raises UsageError for pictures, whose places are unknown."""
    placed = [image for image in images if isinstance(image, PlacedImage)]
    if len(placed) != len(images):
        raise UsageError("pictures are given with token ids; expected a text, parts or messages as the prompt")
    return placed


class Images:
    """Turns pictures in prompts into rows for a model. The first picture loads the processor and the tower.

    Any thread may call it. The tower shares the device with the model like a second model would.
    """

    def __init__(self, model_name: str, load: Callable[[Progress | None], Vision | None], remedy: str = ""):
        self._name = model_name
        self._load = load  # returns None if the model has no tower
        self._remedy = remedy  # what to do without a tower
        self._reader: ImageReader | None = None
        self._lock = Lock()

    def reader(self, progress: Progress | None = None) -> ImageReader:
        """Returns what reads pictures, loaded at the first call. Raises UsageError for a model without a tower."""
        with self._lock:
            if self._reader is None:
                driver_calls.check()
                if (vision := self._load(progress)) is None:
                    raise UsageError(f"{self._name} takes no images: {self._remedy}")
                from llmcl.vision.image_reader import ImageReader

                self._reader = ImageReader(vision)
            return self._reader

    def vision(self, progress: Progress | None = None) -> Vision:
        """Returns processor and tower. Errors: as in `reader`."""
        return self.reader(progress).vision

    def check_texts(self, texts: Iterable[str]) -> None:
        """Raises UsageError for a user's text with a marker or an image token."""
        processor = self.vision().processor
        for text in texts:
            for mark in (processor.marker, processor.image_token):
                if mark in text:
                    raise UsageError(
                        f"a text beside images has {shown(mark)}, which stands for an image of {self._name}; leave "
                        'that out, and give images as parts such as {"type": "image", "path": "a.png"}'
                    )

    def encode(
        self, text: str, pictures: Sequence[Picture], tokenizer: Tokenizer, *, adds_bos: bool, most: int | None = None
    ) -> PromptWithImages:
        """Returns the ids of a text in which each marker stands for a picture, and computes the pictures' rows.

        most: room in tokens. Raises UsageError for a picture that cannot be read, or unless there is one marker per
        picture; ContextLengthError for too many tokens.
        """
        from llmcl.vision.vision import token_in_text

        reader = self.reader()
        marker, token = reader.vision.processor.marker, reader.vision.processor.image_token
        before, *after = text.split(marker)
        if len(after) != len(pictures):
            raise UsageError(
                f"the prompt has {counted(len(pictures), 'image')} and {counted(len(after), 'place')} for images "
                f"({shown(marker)}); expected a place for each image"
            )
        many = len(pictures) > 1
        images = [reader.pixels(each, f"image {i + 1}" if many else "the image") for i, each in enumerate(pictures)]
        text = before + "".join(image.text + part for image, part in zip(images, after, strict=True))
        stand_in, token_id = token_in_text(reader.vision.processor, tokenizer)
        text = text.replace(token, stand_in)
        ids = tokenizer.encode(text, adds_bos, most=most)
        lengths = [rows * columns for image in images for rows, columns in image.grids]
        firsts = _places(ids, token_id, lengths, token)
        if most is not None and len(ids) > most:
            size = counted(len(ids), "token")
            raise ContextLengthError.with_size(
                size,
                f"the prompt has {size}, {sum(lengths)} of them for "
                f"{counted(len(images), 'image')}, the context {most}; give fewer or smaller images, shorten the "
                "prompt or raise the context (--ctx-size, max_context)",
            )
        rows = [each for image in images for each in reader.rows(image)]
        return PromptWithImages(ids, [PlacedImage(*each) for each in zip(firsts, rows, strict=True)])

    def give_back(self) -> None:
        """Releases the rows of earlier images. The device asks for it when memory is scarce."""
        if (reader := self._reader) is not None:
            reader.give_back()

    def close(self) -> None:
        """Releases the tower and all rows."""
        self._reader = None


def images_for(
    name: str,
    checkpoint: Checkpoint,
    device: Device,
    mmproj: str | bool | None,
    *,
    offline: bool,
    progress: Progress | None,
) -> Images:
    """Returns the images for a loaded model. Arguments as for `load`."""
    if mmproj is False:
        return Images(name, lambda progress: None, "they are switched off (--no-mmproj, mmproj=False)")
    if mmproj is not None and (not isinstance(mmproj, (str, os.PathLike)) or not str(mmproj)):
        raise UsageError(f"mmproj is {shown(mmproj)}; expected the path of a .gguf file, False or None")
    tower = None if mmproj is None else resolve(str(mmproj), offline, progress)
    path, is_gguf = checkpoint.path, checkpoint.gguf_metadata is not None

    def load(progress: Progress | None) -> Vision | None:
        from llmcl.vision.load import load_vision

        file = tower
        if file is None and is_gguf:
            file = find_mmproj(name, path, offline=offline, progress=progress)
            if file is None:
                return None
        if progress is not None:
            progress(LOADING_TOWER, 0, 0)
        with open_checkpoint(str(path)) as checkpoint:
            return load_vision(device, checkpoint, file)

    remedy = "it has no vision tower; take a model that has one (`llmcl models` lists families with images)"
    if is_gguf:
        remedy = f"no mmproj-*.gguf lies beside {path.name}; give the file with the vision tower (--mmproj, mmproj)"
    images = Images(name, load, remedy)
    device.spares.add(images)
    return images


def _places(ids: Sequence[int], token_id: int, lengths: Sequence[int], token: str) -> list[int]:
    """Returns the index of each image's first token. Raises UsageError for other image tokens in the prompt."""
    at = [i for i, each in enumerate(ids) if each == token_id]
    if len(at) != sum(lengths):
        raise UsageError(
            f"the prompt has {counted(len(at), 'image token')}, expected {sum(lengths)} for its images; leave "
            f"{shown(token)} out of the text"
        )
    firsts = [at[sum(lengths[:i])] for i in range(len(lengths))]
    assert all(ids[first : first + n] == [token_id] * n for first, n in zip(firsts, lengths, strict=True))
    return firsts

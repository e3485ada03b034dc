"""Reads picture files of strangers within bounds: one upright RGB picture, or a UsageError that says what is wrong."""

from __future__ import annotations

import io
import os
import warnings
from hashlib import sha256
from pathlib import Path
from threading import Lock

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from llmcl.errors import UsageError, one_line, shown

FORMATS = "PNG", "JPEG", "WEBP", "GIF", "BMP"
MAX_BYTES = 32 << 20
MAX_PIXELS = 40_000_000

Source = str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image

_EXPECTED = "expected a PNG, JPEG, WebP, GIF or BMP picture"
_BOMBS = Image.DecompressionBombWarning, Image.DecompressionBombError
_warnings_lock = Lock()  # Python's warning filters belong to the process


def read_picture(source: Source, name: str | None = None) -> Image.Image:
    """Returns an RGB picture from a path, a file's bytes or a Pillow picture: first frame, upright, over white.

    name: for messages; None: the path, or "the image". Raises UsageError for a file that is missing, damaged, of
    another type or too large. The header tells the size, so nothing large is decoded first.
    """
    if name is None:
        name = shown(os.fspath(source)) if isinstance(source, (str, os.PathLike)) else "the image"
    data = whole_file(source, name)
    if isinstance(data, Image.Image):
        return data
    try:
        with _warnings_lock, warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except _BOMBS as error:
        raise UsageError(
            f"{name} has too many pixels, by its header ({one_line(error)}); expected at most {_megapixels(MAX_PIXELS)}"
        ) from None
    except UnidentifiedImageError:
        raise UsageError(f"{name} is no picture of a known type; {_EXPECTED}") from None
    except Exception as error:  # Pillow's parsers raise many kinds on hostile headers
        raise UsageError(f"{name} cannot be read ({one_line(error)}); {_EXPECTED}") from None
    with picture:
        return _prepared(picture, name)


def whole_file(source: Source, name: str = "the image") -> bytes | Image.Image:
    """Returns the bytes of a picture file, or a Pillow picture in RGB. Raises UsageError outside the bounds."""
    if isinstance(source, Image.Image):
        return _prepared(source, name)
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = bytes(source)
    elif isinstance(source, (str, os.PathLike)):
        data = _file(Path(source), shown(os.fspath(source)))
    else:
        raise UsageError(f"{name} is {shown(source)}; expected a path, bytes or a Pillow picture")
    if not data:
        raise UsageError(f"{name} is empty; {_EXPECTED}")
    if len(data) > MAX_BYTES:
        raise _too_many_bytes(name, len(data))
    return data


def picture_key(picture: bytes | Image.Image) -> bytes:
    """Returns a digest of a result of `whole_file`."""
    if isinstance(picture, bytes):
        return sha256(picture).digest()
    return sha256(f"{picture.size}".encode() + picture.tobytes()).digest()


def _file(path: Path, name: str) -> bytes:
    try:
        if not path.is_file():
            problem = "is no file" if path.exists() else "does not exist"
            raise UsageError(f"image file {name} {problem}; {_EXPECTED}")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise _too_many_bytes(name, size)
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        if isinstance(error, UsageError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"image file {name} cannot be read: {one_line(reason)}") from None


def _prepared(picture: Image.Image, name: str) -> Image.Image:
    width, height = picture.size
    if width < 1 or height < 1:
        raise UsageError(f"{name} is {width} x {height} pixels; expected at least 1 x 1")
    if width * height > MAX_PIXELS:
        raise UsageError(
            f"{name} is {width} x {height} pixels ({_megapixels(width * height)}); expected at most "
            f"{_megapixels(MAX_PIXELS)}: scale it down"
        )
    try:
        picture.load()
        return _as_rgb(_upright(picture))
    except Exception as error:  # Pillow's decoders raise many kinds on damaged data
        raise UsageError(f"{name} is damaged: {one_line(error)}; {_EXPECTED}") from None


def _upright(picture: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(picture)
    except Exception:  # damaged metadata beside a whole picture
        return picture


def _as_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I;16") or picture.mode == "I":  # 16 bits of grey: Pillow would cut off values over 255
        grey = np.asarray(picture).clip(0, 65535) // 257
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    white = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")


def _too_many_bytes(name: str, size: int) -> UsageError:
    return UsageError(f"{name} has {size / 2**20:.1f} MB; expected at most {MAX_BYTES >> 20} MB: scale it down")


def _megapixels(n: int) -> str:
    return f"{n / 1e6:.0f} megapixels"

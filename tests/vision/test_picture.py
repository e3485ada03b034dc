"""Picture files as cameras, browsers and strangers write them: one upright RGB picture, or a sentence."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from llmcl.errors import UsageError
from llmcl.vision import picture
from llmcl.vision.picture import read_picture


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def halves() -> Image.Image:
    """Left half red, right half blue, 32 x 16 pixels."""
    image = Image.new("RGB", (32, 16), (255, 0, 0))
    image.paste((0, 0, 255), (16, 0, 32, 16))
    return image


def noise() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))


def png(width: int, height: int, data: bytes = b"\0" * 64) -> bytes:
    """A PNG file of RGB with this header, by the specification's layout."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_every_format_gives_the_same_picture(kind: str, tmp_path: Path) -> None:
    data = encoded(halves(), kind)
    (path := tmp_path / "picture").write_bytes(data)
    for source in (data, bytearray(data), path, str(path), Image.open(io.BytesIO(data))):
        pixels = np.asarray(read_picture(source), dtype=int)
        assert pixels.shape == (16, 32, 3)
        np.testing.assert_allclose(pixels[8, 4], (255, 0, 0), atol=12)
        np.testing.assert_allclose(pixels[8, 28], (0, 0, 255), atol=12)


def test_a_camera_on_its_side_gives_an_upright_picture() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # EXIF orientation: the picture's top is the file's right side
    upright = read_picture(encoded(halves(), "JPEG", exif=turned))
    assert upright.size == (16, 32)
    np.testing.assert_allclose(upright.getpixel((8, 4)), (255, 0, 0), atol=12)


def test_damaged_metadata_does_not_matter() -> None:
    """Pillow reads this EXIF block, and raises struct.error when it writes the block without the orientation."""
    entries = bytes.fromhex("01000002 00000015 00000032  01120003 00000001 00060010  92860001 00000003 61626300")
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x03" + entries + b"\0" * 4 + b"x" * 20 + b"\0\0"
    with pytest.raises(struct.error):
        ImageOps.exif_transpose(Image.open(io.BytesIO(encoded(halves(), "JPEG", exif=exif))))
    assert read_picture(encoded(halves(), "JPEG", exif=exif)).size == (32, 16)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(mode: str) -> None:
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.putpixel((0, 0), (0, 0, 0, 255))
    result = read_picture(encoded(image if mode == "RGBA" else image.convert(mode), "PNG"))
    assert result.mode == "RGB"
    assert result.getpixel((0, 0)) == (0, 0, 0) and result.getpixel((3, 3)) == (255, 255, 255)


def test_sixteen_bits_of_grey_are_scaled() -> None:
    image = Image.fromarray(np.array([[0, 257, 32896, 65535]], dtype=np.uint16))
    assert np.asarray(read_picture(encoded(image, "PNG")))[0, :, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_gives_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("lime", "black", "red")]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
    assert read_picture(data).getpixel((4, 4)) == (0, 255, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (png(60_000, 60_000), "too many pixels"),  # Pillow refuses
        (png(10_000, 10_000), "too many pixels"),  # Pillow warns
        (png(8000, 8000), "8000 x 8000 pixels .64 megapixels.; expected at most 40 megapixels"),
        (png(0, 8), "the image is no picture|the image is 0 x 8"),
        (png(64, 64), "damaged"),  # too few rows
        (encoded(noise(), "JPEG")[:-900], "damaged: image file is truncated"),
        (encoded(noise(), "PNG")[:-900], "damaged: image file is truncated"),
        (encoded(noise(), "GIF")[:-900], "damaged: image file is truncated"),
        (encoded(noise(), "BMP")[:-900], "damaged: image file is truncated"),
        (encoded(noise(), "WEBP")[:-900], "is no picture|is damaged|cannot be read"),
        (encoded(noise(), "PNG")[:40], "is no picture of a known type"),
        (encoded(halves(), "TIFF"), "is no picture of a known type; expected a PNG, JPEG, WebP, GIF or BMP"),
        (b"%PDF-1.7\n", "is no picture of a known type"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no picture of a known type"),
        (b"", "the image is empty"),
    ],
)
def test_bad_files_are_refused(data: bytes, message: str) -> None:
    with warnings.catch_warnings(record=True) as seen, pytest.raises(UsageError, match=message):
        read_picture(data)
    assert not seen


def test_paths_that_lead_to_no_picture(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "missing.png", "missing.png' does not exist"),
        (tmp_path, "is no file"),
        ("a\0b", "a.x00b' (does not exist|cannot be read)"),
    ):
        with pytest.raises(UsageError, match=message):
            read_picture(path)


def test_large_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "MAX_BYTES", 1 << 20)
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(3 << 20)
    with pytest.raises(UsageError, match=r"large.png' has 3.0 MB; expected at most 1 MB"):
        read_picture(tmp_path / "large.png")
    with pytest.raises(UsageError, match=r"picture 2 has 1.0 MB"):
        read_picture(b"x" * ((1 << 20) + 1), "picture 2")


def test_other_values_are_refused() -> None:
    with pytest.raises(UsageError, match="the image is 3; expected a path, bytes or a Pillow picture"):
        read_picture(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="9000 x 9000"):
        read_picture(Image.new("1", (9000, 9000)))

"""Damaged image files on the server's path: each is read, or refused by its place, in bounded time and memory."""

from __future__ import annotations

import io
import random
import resource
import time
from collections import Counter

import numpy as np
from examples import examples
from image_server import data_url, image_server
from PIL import Image

KINDS = "PNG", "JPEG", "WEBP", "GIF"
N_CASES = examples(1000)
LIMIT_S = 5.0  # a case takes milliseconds
LIMIT_KIB = 1 << 20


def sound_files() -> list[bytes]:
    """Pictures with noise, in each format: grey, with transparency, and with two frames."""
    noise = np.random.default_rng(1).integers(0, 255, (40, 60, 4), np.uint8)
    pictures = [Image.fromarray(noise[..., :3]), Image.fromarray(noise), Image.fromarray(noise[..., 0])]
    files = []
    for kind in KINDS:
        for picture in pictures:
            file = io.BytesIO()
            more = {} if kind in ("JPEG", "PNG") else {"save_all": True, "append_images": [pictures[0]]}
            (picture.convert("RGB") if kind == "JPEG" else picture).save(file, kind, **more)
            files.append(file.getvalue())
    return files


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Returns the file with one to four changes; half of them at its beginning, where sizes stand."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(min(64, len(changed)) if draw.random() < 0.5 else len(changed))
        what = draw.choice(["set", "set", "set", "large", "cut", "repeat", "remove", "insert"])
        if what == "set":
            changed[at] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
        elif what == "large":
            changed[at : at + 4] = draw.choice([b"\xff" * 4, b"\x00\x00\xff\xff", b"\x7f\xff\xff\xff", b"\x00" * 4])
        elif what == "cut":
            del changed[max(1, at) :]
        elif what == "repeat":
            changed[at:at] = changed[at : at + 200] * draw.choice([1, 50])
        elif what == "remove":
            del changed[at : at + draw.choice([1, 4, 100])]
        else:
            changed[at:at] = draw.randbytes(8)
        if not changed:
            break
    return bytes(changed)


def test_damaged_files_are_read_or_refused() -> None:
    draw, files, came = random.Random(1), sound_files(), Counter[int]()
    with image_server() as server:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(N_CASES):
            part = {"type": "image_url", "image_url": {"url": data_url(mutated(draw.choice(files), draw))}}
            start = time.monotonic()
            answer = server.post(
                "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
            )
            assert time.monotonic() - start < LIMIT_S
            came[answer.status_code] += 1
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 400:
                error = answer.json()["error"]
                assert error["param"] == "messages[0].content[0]" and error["code"] == "invalid_image", error
                assert error["message"].isprintable() and len(error["message"]) < 400, error
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < LIMIT_KIB
        assert server.http.get("/health").status_code == 200
    assert came[200] and came[400], came

"""Images in prompts: every form in which callers give them becomes token ids with rows at the image tokens."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vision import MARKER, TOKEN, FakeTower, fake_vision, image_tokenizer
from late_kernels import compile_when_used
from PIL import Image

from llmcl.engine.images import Images, PromptWithImages
from llmcl.engine.llm import LLM
from llmcl.engine.prompts import PromptReader
from llmcl.errors import ContextLengthError, UsageError
from llmcl.models.image_rows import ImageRows, PlacedImage
from llmcl.vision import image_reader

compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)


def png(width: int, height: int, color: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.fixture
def reader() -> PromptReader:
    reader = PromptReader("a model")
    reader.tokenizer = image_tokenizer()
    vision = fake_vision()
    reader.images = Images("a model", lambda progress: vision)
    return reader


def tower(reader: PromptReader) -> FakeTower:
    tower = reader.images.vision().tower
    assert isinstance(tower, FakeTower)
    return tower


def placed(ids: list[int]) -> list[tuple[int, int]]:
    """First token and length of each image; checks that image tokens, and no others, have rows."""
    assert isinstance(ids, PromptWithImages)
    token = image_tokenizer().id_of(TOKEN)
    covered = [i for image in ids.images for i in range(image.first, image.end)]
    assert covered == [i for i, each in enumerate(ids) if each == token]
    return [(image.first, image.image.n) for image in ids.images]


FORMS: dict[str, Any] = {
    "parts": [{"type": "image", "bytes": png(3, 2)}, "What?"],
    "text part": [{"type": "image", "bytes": png(3, 2)}, {"type": "text", "text": "What?"}],
    "Pillow": [{"type": "image", "image": Image.new("RGB", (3, 2))}, "What?"],
    "transformers": [{"type": "image", "url": data_url(png(3, 2))}, "What?"],
    "base64": [{"type": "image", "base64": base64.b64encode(png(3, 2)).decode()}, "What?"],
    "OpenAI": [{"type": "image_url", "image_url": {"url": data_url(png(3, 2)), "detail": "low"}}, "What?"],
    "data as image": [{"type": "image", "image": data_url(png(3, 2))}, "What?"],
    "message": [
        {"role": "user", "content": [{"type": "image", "bytes": png(3, 2)}, {"type": "text", "text": "What?"}]}
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_give_the_same_ids(form: str, reader: PromptReader) -> None:
    ids = reader.encode(FORMS[form])
    assert ids == reader.tokenizer.encode(f"<user>[{TOKEN * 6}]What?<model>", False)
    assert placed(ids) == [(7, 6)]


def test_paths_and_the_argument_images(reader: PromptReader, tmp_path: Path) -> None:
    (path := tmp_path / "a b.png").write_bytes(png(3, 2))
    expected = reader.encode(FORMS["parts"])
    bare = [{"type": "image"}, "What?"]
    for ids in (
        reader.encode([{"type": "image", "path": path}, "What?"]),
        reader.encode([{"type": "image", "image": str(path)}, "What?"]),
        reader.encode("What?", images=[path]),
        reader.encode(bare, images=[png(3, 2)]),
        reader.encode([{"role": "user", "content": bare}], images=[str(path)]),
    ):
        assert ids == expected and placed(ids) == [(7, 6)]


def test_images_keep_their_order_over_messages(reader: PromptReader) -> None:
    messages = [
        {"role": "user", "content": [{"type": "image"}, "and", {"type": "image", "bytes": png(1, 1)}]},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": ["And", {"type": "image"}]},
    ]
    ids = reader.encode(messages, images=[png(2, 2), png(5, 1)])
    assert [n for _, n in placed(ids)] == [4, 1, 5]
    assert tower(reader).seen == [(2, 2, 3), (1, 1, 3), (1, 5, 3)]


def test_raw_prompts_have_markers(reader: PromptReader) -> None:
    ids = reader.encode(f"a {MARKER} b {MARKER}", raw=True, images=[png(1, 2), png(2, 2)])
    assert ids == reader.tokenizer.encode(f"a [{TOKEN * 2}] b [{TOKEN * 4}]", True)
    assert ids == reader.encode(
        ["a ", {"type": "image"}, " b ", {"type": "image"}], raw=True, images=[png(1, 2), png(2, 2)]
    )
    with pytest.raises(UsageError, match=r"has 1 image and 0 places for images \('<start_of_image>'\)"):
        reader.encode("a", raw=True, images=[png(1, 2)])


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"])
def test_without_a_template_for_parts_markers_are_written(template: str | None, reader: PromptReader) -> None:
    reader.tokenizer = image_tokenizer(template)
    assert [n for _, n in placed(reader.encode("What?", images=[png(3, 2)]))] == [6]


def test_parts_of_text_alone_need_no_vision(reader: PromptReader) -> None:
    reader.images = Images("a model", lambda progress: pytest.fail("no image"))
    reader.tokenizer = image_tokenizer("{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}")
    assert reader.encode([{"type": "text", "text": "a"}, "b"]) == reader.tokenizer.encode("usera\nb", False)
    assert reader.encode("a", images=[]) == reader.encode("a")


def test_an_image_token_may_be_missing_in_a_gguf_file(reader: PromptReader) -> None:
    reader.tokenizer = image_tokenizer(with_token=False)
    ids = reader.encode("What?", images=[png(3, 2)])
    assert isinstance(ids, PromptWithImages)
    assert [(image.first, image.end) for image in ids.images] == [(7, 13)]
    assert {*ids[7:13]} == {reader.tokenizer.id_of("<pad>")}


@pytest.mark.parametrize("text", [f"a {MARKER}", f"a {TOKEN}"])
def test_a_user_cannot_write_images(text: str, reader: PromptReader) -> None:
    for messages in (
        [{"type": "image", "bytes": png(1, 1)}, text],
        [{"role": "system", "content": text}, *FORMS["message"]],
    ):
        with pytest.raises(UsageError, match=r"a text beside images has .* leave that out"):
            reader.encode(messages)
    assert reader.encode(text) == reader.tokenizer.encode(f"<user>{text}<model>", False)  # as ever without images


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        ([{"type": "image"}, "a"], None, "image 1 has no picture; expected one of image, path"),
        ([{"type": "image", "path": "a", "bytes": b"b"}, "a"], None, "image 1 has path and bytes; expected one"),
        (
            [{"type": "image", "url": "https://a/b.png"}, "a"],
            None,
            "image 1 is 'https://a/b.png'; expected a data: URL",
        ),
        ([{"type": "image", "url": "data:image/png,abc"}, "a"], None, "expected data:image/png;base64"),
        ([{"type": "image", "base64": "%%"}, "a"], None, "image 1 is no base64"),
        ([{"type": "image_url"}, "a"], None, "image 1 has no picture"),
        ([{"type": "image", "image": 3}, "a"], None, "the image is 3; expected a path, bytes or a Pillow picture"),
        ([{"type": "image", "path": "no.png"}, "a"], None, "image file 'no.png' does not exist"),
        ([{"type": "image"}, 3], [png(1, 1)], "a part of a message is 3; expected a text"),
        ([{"type": "text", "text": 3}], None, "the text of a message's part is 3; expected a string"),
        ("a", png(1, 1), "images is .*; expected a list of paths"),
        ("a", [png(1, 1), b"abc"], "image 2 is no picture of a known type"),
        ([{"role": "user", "content": "a"}], [png(1, 1)], "images has 1, the messages have 0 parts without a picture"),
        ([1, 2], [png(1, 1)], "pictures are given with token ids"),
    ],
)
def test_what_is_wrong_is_said(prompt: Any, images: Any, message: str, reader: PromptReader) -> None:
    with pytest.raises(UsageError, match=message):
        reader.encode(prompt, images=images)
    assert not tower(reader).seen


def test_a_model_without_a_tower_says_what_to_do(reader: PromptReader) -> None:
    reader.images = Images("a/model", lambda progress: None, "give its projector (--mmproj FILE)")
    with pytest.raises(UsageError, match=r"a/model takes no images: give its projector \(--mmproj FILE\)"):
        reader.encode(FORMS["parts"])


def test_an_image_that_the_model_cannot_read_is_refused(small_llm: LLM) -> None:
    ids = PromptWithImages([5, 6, 7], [PlacedImage(1, ImageRows(SimpleNamespace(nbytes=4), 1, b""))])  # type: ignore[arg-type]
    for ask in (small_llm.generate, small_llm.stream, small_llm.logits, lambda ids: small_llm.generate([ids, [5]])):
        with pytest.raises(UsageError, match=r"an image's 1 row fill 4 bytes; expected \d+"):
            ask(ids)


def test_a_prompt_too_long_says_how_much_the_images_take(reader: PromptReader) -> None:
    with pytest.raises(ContextLengthError, match="has 36 tokens, 14 of them for 2 images, the context 20; give fewer"):
        reader.encode("What?", images=[png(3, 3), png(5, 1)], most=20)
    assert not tower(reader).seen  # nothing was computed


def test_rows_of_an_image_sent_again_are_kept(reader: PromptReader, monkeypatch: pytest.MonkeyPatch) -> None:
    first = reader.encode("What?", images=[png(3, 2)])
    again = reader.encode("And now?", images=[png(3, 2)])
    assert isinstance(first, PromptWithImages) and isinstance(again, PromptWithImages)
    assert first.images[0].image is again.images[0].image
    monkeypatch.setattr(image_reader, "MAX_KEPT_BYTES", 100)  # an image of 3 x 2 has 72 bytes
    reader.encode("What?", images=[png(3, 2, "blue")])
    reader.encode("What?", images=[png(3, 2)])
    assert len(tower(reader).seen) == 3
    reader.images.give_back()
    reader.encode("What?", images=[png(3, 2)])
    assert len(tower(reader).seen) == 4

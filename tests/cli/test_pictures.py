"""Pictures on the command line: --image, --mmproj and /image, on an engine that answers at once."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from echo_engine import Engine
from PIL import Image

from llmcl.cli.pictures import picture_and_text
from llmcl.errors import UsageError


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    Image.new("RGB", (4, 3), "red").save(tmp_path / "a b.png")
    return tmp_path / "a b.png"


@pytest.fixture
def chat(invoke: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def chat(*lines: str) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join([*lines, ""]).encode())))
        assert invoke("chat", "-m", "m") == 0

    return chat


def test_image_options_keep_their_order(
    picture: Path, engine: Engine, invoke: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    (other := picture.with_name("c.png")).write_bytes(picture.read_bytes())
    for command in (["generate", "-m", "m", "-p", "What?"], ["run", "m", "What?"]):
        assert invoke(*command, "--image", str(picture), "--image", str(other)) == 0
        assert engine.request["images"] == [str(picture), str(other)] and engine.request["prompt"] == "What?"
    assert invoke("generate", "-m", "m", "-p", "What?") == 0
    assert "images" not in engine.request


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "-m", "m", "-p", "x", "--image", "no.png"], "image file 'no.png' does not exist"),
        (["generate", "-m", "m", "-p", "x", "--image", __file__], "is no picture of a known type; expected a PNG"),
        (["generate", "-m", "m", "--input", __file__, "--output", "x", "--image", "a.png"], "--input"),
        (["run", "m", "--image", "no.png"], "--image is for one prompt: give a PROMPT, or open a chat"),
        (["generate", "-m", "m", "-p", "x", "--mmproj", "a.gguf", "--no-mmproj"], "give one of the two"),
    ],
)
def test_bad_pictures_are_refused_before_a_model_is_loaded(
    arguments: list[str],
    message: str,
    engine: Engine,
    invoke: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert invoke(*arguments) == 2
    assert message in capsys.readouterr().err and not engine.loaded


def test_the_tower_of_a_gguf_model(engine: Engine, invoke: Callable[..., int]) -> None:
    for options, expected in (([], None), (["--mmproj", "a.gguf"], "a.gguf"), (["--no-mmproj"], False)):
        assert invoke("generate", "-m", "m", "-p", "x", *options) == 0
        assert engine.loaded.get("mmproj") == expected


def test_a_picture_in_a_chat_goes_with_one_message(picture: Path, engine: Engine, chat: Callable[..., None]) -> None:
    chat(f"/image {picture} What is it?", "And now?", f"/image {picture}", f'/image "{picture}"', "Both?", "/regen")
    part = {"type": "image", "image": str(picture)}
    assert [request["prompt"] for request in engine.conversation.requests] == [
        [part, {"type": "text", "text": "What is it?"}],
        "And now?",
        [part, part, {"type": "text", "text": "Both?"}],
        [part, part, {"type": "text", "text": "Both?"}],
    ]


def test_a_conversation_with_pictures_is_saved(
    picture: Path, engine: Engine, chat: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    file = picture.with_name("chat.json")
    chat(f"/image {picture} What is it?", f"/save {file}", "/undo")
    saved = json.loads(file.read_text())["messages"]
    assert saved[0]["content"][0] == {"type": "image", "image": str(picture)}
    assert "forgotten: [image] What is it?" in capsys.readouterr().err
    chat(f"/load {file}", "And now?")
    assert engine.conversation.messages[:2] == saved
    saved[0]["content"][0]["type"] = "video"
    file.write_text(json.dumps(saved))
    chat(f"/load {file}")
    assert "is no saved conversation" in capsys.readouterr().err


def test_where_a_path_ends(picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(picture.parent))
    for written in (str(picture), f"'{picture}'", str(picture).replace(" ", "\\ "), "~/a b.png"):
        assert picture_and_text(written) == (str(picture), "")
        assert picture_and_text(f"{written} What's  it?") == (str(picture), "What's  it?")
    with pytest.raises(UsageError, match=r"/image ~/no\.png: there is no such file"):
        picture_and_text("~/no.png What?")

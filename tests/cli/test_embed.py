"""`llmcl embed`: texts in, lines of JSON or a NumPy file out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_engine import Engine

VECTORS = np.array([[0.1, -0.5], [1e-9, 2.0]], np.float32)


@pytest.fixture
def asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the model was asked; it answers with VECTORS."""
    asked: dict[str, Any] = {}

    def embed(texts: list[str], **options: Any) -> np.ndarray:
        asked.update(options, texts=texts)
        return VECTORS[: len(texts)]

    monkeypatch.setattr(engine, "embed", embed, raising=False)
    return asked


def test_texts_become_lines(
    asked: dict[str, Any], engine: Engine, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--pooling last --prompt-name query --dimensions 2 --truncate --no-normalize -c 48"
    assert invoke("embed", "-m", "m", *options.split(), "one text", "another") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1]
    np.testing.assert_allclose([line["embedding"] for line in lines], VECTORS, atol=1e-8)
    expected = {"pooling": "last", "prompt_name": "query", "dimensions": 2, "truncate": True, "normalize": False}
    assert asked == expected | {"texts": ["one text", "another"]} and engine.loaded["max_context"] == 48


def test_a_file_of_texts_and_a_file_of_vectors(
    asked: dict[str, Any], invoke: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").write_text('"one"\n\n{"input": "two \\u00e9", "id": 5}\n')
    assert invoke("embed", "-m", "m", "-f", str(tmp_path / "texts"), "-o", str(tmp_path / "v.npy")) == 0
    assert asked["texts"] == ["one", "two \u00e9"] and asked["normalize"] and asked["pooling"] is None
    np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), VECTORS)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "no text: give texts"),
        ("", ["-f", "texts"], "-f/--file texts: has no texts; expected one a line"),
        ('"a"\nb', ["-f", "texts"], "-f/--file texts, line 2 is 'b'; expected JSON"),
        ('{"id": 1}', ["-f", "texts"], "line 1 is '{\"id\": 1}'; expected a string, or an object"),
        ('"a"', ["-f", "texts", "b"], "texts and -f/--file texts are both given"),
        (None, ["-f", "missing"], "-f/--file missing: cannot be read"),
        (None, ["b", "-o", "none/v.npy"], "-o/--output none/v.npy: cannot be written"),
        (None, ["b", "--pooling", "max"], "'max' given, expected one of mean, cls, last"),
    ],
)
def test_wrong_arguments_are_refused(
    content: str | None,
    arguments: list[str],
    message: str,
    asked: dict[str, Any],
    invoke: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "texts").write_text(content)
    assert invoke("embed", "-m", "m", *arguments) == 2
    assert message in capsys.readouterr().err and not asked

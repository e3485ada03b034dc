"""Metadata of every GGUF type, ordinary or odd: taken over byte for byte, or refused by name."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzz.seeds import ARRAY, STRING, Entry, GgufFile, gguf_file

from llmcl.checkpoint import open_checkpoint
from llmcl.checkpoint.gguf import read_gguf
from llmcl.convert import convert
from llmcl.errors import CheckpointError, UnsupportedModelError
from llmcl.tokenizer import Tokenizer

INTEGERS, FLOATS, BOOL = (0, 1, 2, 3, 4, 5, 10, 11), (6, 12), 7
VALUES: dict[int, list[Any]] = {
    **{key: [0, 1, 100] for key in INTEGERS},
    **{key: [0.0, -1.5, math.nan, -math.inf] for key in FLOATS},
    BOOL: [True, False],
    STRING: ["", "a", "na\u00efve \U0001f642", "a\x00b"],
}


def with_entries(entries: dict[str, tuple[int, Any]], path: Path) -> Path:
    file: GgufFile = copy.deepcopy(gguf_file("gpt2"))
    file.entries = [entry for entry in file.entries if entry.key not in entries]
    file.entries += [Entry(key, type, value) for key, (type, value) in entries.items()]
    path.write_bytes(file.pack())
    return path


def test_every_type_is_taken_over(tmp_path: Path) -> None:
    """Empty arrays and arrays of arrays, too, which the package gguf does not write."""
    entries: dict[str, tuple[int, Any]] = {}
    for type, values in VALUES.items():
        entries |= {f"odd.{type}.{i}": (type, value) for i, value in enumerate(values)}
        entries |= {f"odd.{type}.array": (ARRAY, (type, values)), f"odd.{type}.empty": (ARRAY, (type, []))}
        entries[f"odd.{type}.nested"] = ARRAY, (ARRAY, [(type, values), (type, []), (type, values[:1])])
    source = with_entries(entries, tmp_path / "source.gguf")
    target = convert(str(source), tmp_path / "target.gguf", dtype="float32")
    before, after = read_gguf(source)[0], read_gguf(target)[0]
    odd = [key for key in before if key.startswith("odd.")]
    assert len(odd) == len(entries)
    assert {key: repr(after[key]) for key in odd} == {key: repr(before[key]) for key in odd}
    data = source.read_bytes(), target.read_bytes()
    start, end = (file.index(b"odd.0.0") for file in data)
    length = data[0].index(b"odd.8.nested") - start + 40
    assert data[0][start : start + length] == data[1][end : end + length]


@pytest.mark.parametrize("key", ["unknown_token_id", "padding_token_id"])
@pytest.mark.parametrize(
    ("type", "value", "shown"),
    [
        (6, 1.5, "1.5"),
        (STRING, "1", "'1'"),
        (BOOL, True, "True"),
        (ARRAY, (4, []), "[]"),
        (ARRAY, (4, [1, 2]), "[1, 2]"),
    ],
)
def test_a_token_id_of_another_type_is_refused(tmp_path: Path, key: str, type: int, value: Any, shown: str) -> None:
    source = with_entries({f"tokenizer.ggml.{key}": (type, value)}, tmp_path / "source.gguf")
    with pytest.raises(CheckpointError) as error:
        convert(str(source), tmp_path / "folder")
    message = str(error.value)
    assert f"tokenizer.ggml.{key} is " in message and "expected a token id" in message and "fetch or convert" in message
    assert shown in message or isinstance(value, tuple)


@pytest.mark.parametrize("value", [0, 2**32 - 1])
def test_a_token_id_beyond_the_vocabulary_counts_as_none(tmp_path: Path, value: int) -> None:
    source = with_entries({"tokenizer.ggml.padding_token_id": (4, value)}, tmp_path / "source.gguf")
    settings = json.loads((convert(str(source), tmp_path / "folder") / "tokenizer_config.json").read_text())
    assert ("pad_token" in settings) == (value == 0)


def test_a_tokenizer_without_merges_becomes_metadata(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    source = make_folder(tmp_path / "source")
    path = source / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["model"]["merges"] = []
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    target = convert(str(source), tmp_path / "target.gguf")
    with open_checkpoint(str(source)) as before, open_checkpoint(str(target)) as after:
        old, new = map(Tokenizer.from_checkpoint, (before, after))
        assert new.encode("the quick fox") == old.encode("the quick fox")


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", None])
def test_an_added_token_that_gguf_cannot_describe_is_refused(
    tmp_path: Path, make_folder: Callable[..., Path], flag: str | None
) -> None:
    """The file would give other ids than the folder. Phi-3's folders have rstrip, RoBERTa's lstrip."""
    source = make_folder(tmp_path / "source")
    path = source / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    added = {"id": max(tokenizer["model"]["vocab"].values()) + 1, "content": "<|x|>", "special": True}
    flags = {name: name == flag for name in ("lstrip", "rstrip", "single_word", "normalized")}
    tokenizer["added_tokens"].append(added | flags)
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    if flag is None:
        assert convert(str(source), tmp_path / "target.gguf").exists()
        return
    with pytest.raises(UnsupportedModelError, match=rf"its token '<\|x\|>' has {flag}, which has no key"):
        convert(str(source), tmp_path / "target.gguf")


@pytest.mark.parametrize("source", ["smollm2", ""])
def test_an_empty_name_of_the_target_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    invoke: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    source: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for more in ([], ["--force"]):
        assert invoke("convert", source, "", *more) == 2
        assert capsys.readouterr().err.startswith("error: the target is ''; expected the name of a file")
    assert list(tmp_path.iterdir()) == []

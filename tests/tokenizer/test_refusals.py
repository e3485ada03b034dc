"""Tokenizers that cannot be read or do not fit the model, and texts that cannot be encoded."""

from __future__ import annotations

import base64
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from made_tokenizers import gguf_of, save_folder, sentencepiece_gguf, source, trained
from tokenizers import decoders, models, normalizers

from llmcl.checkpoint.pre_tokenizers import PRE_TOKENIZERS
from llmcl.errors import CheckpointError, UnsupportedModelError, UsageError
from llmcl.tokenizer import Tokenizer, damage
from llmcl.tokenizer.library import without_report

# Written by sentencepiece's trainer for three rules: \ufb01 becomes fi, \xe9 becomes e, \u2026 becomes three dots.
CHARSMAP = zlib.decompress(base64.b64decode(
    "eNoV03e0D2QYB/D3/MLpGCVbiU6ufVyzXKvMZGfPzNy6iBBNuTezItcubrbrXq49steVWWRmhpLVnkTo83vP+Zzned/3r/e8zzdkCSE8+EDITI"
    "uE9Kwh2CYmpkRCaq4QXYlJ1UPIiIuEbPocDrITvcrJwzzEI+QmL3nITz4KUoDCFOIxHuVxilCMonyXHAlPqMV5khLEUIqSlKE05ShLeX6NiYQK"
    "aiyVqEgVKvMUVanG03hCiKMmNahNLZ7lGepSh/rUoyENaMRzNOZ5mtKE5jSjJS1oxQu0oTXtaEsH2tOJjnShMy/Sle50oyc96E0v+vASLxNPAq"
    "/Qj768Sn8GMoBBvMYQBjOU13mDYbzFm7zD2wznXUbwHknRj2Yk7zOaUYxlDB8wjo/4kAmMZyIfM4lkpjCZaUxlBtP5lE+YxUw+I4U5zGYec1nA"
    "fBaxkMWkkk4aS1nCMjJYwXJWsZI1rGYda/mc9WxkA5vZxFa2sJ1t7GQHmeziC3azlz3sZx8HOcBXfMlhDnGErznGUU5wnG84yWlOcZYznOccF/"
    "iWS1zk+2gW+IHLXOUK17nGj9zgZ36KZoBf+J3f+JM/+Ju/uMk//Mst7nCbu/zHfe5FMxQba+biE8L/kdeKcw=="
))  # fmt: skip


def test_folder_without_tokenizer_json_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*save_pretrained"):
        Tokenizer.from_checkpoint(source(None, 10, tmp_path))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 1}', "\x00\xff"])
def test_damaged_tokenizer_json_is_a_checkpoint_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match="cannot be read as a tokenizer"):
        Tokenizer.from_checkpoint(source(None, 10, tmp_path))


@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map", "chat_template"])
@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000])
def test_damaged_settings_are_a_checkpoint_error(tmp_path: Path, name: str, content: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{name}\.json"):
        files: dict[str, Any] = {f"{name}__json": content}
        save_folder(tmp_path, **files)


def test_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="501 tokens, but the model only 499 embeddings"):
        save_folder(tmp_path, vocab_size=499)
    metadata = sentencepiece_gguf()
    with pytest.raises(CheckpointError, match="do not belong together"):
        Tokenizer.from_checkpoint(source(metadata, 100, bos_token_id=1))


def test_an_added_token_needs_no_embedding_until_a_text_holds_it(tmp_path: Path) -> None:
    """Gemma 3 1B has one more token than its embedding has rows."""
    tokenizer = save_folder(tmp_path, vocab_size=500)
    assert tokenizer.n_vocab == 500
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    with pytest.raises(
        UsageError, match="the text holds '<think>', for which the model has no embedding: its id is 500 of 500"
    ):
        tokenizer.encode("so <think>")


def test_id_beyond_the_embedding_never_leaves_the_tokenizer() -> None:
    tokenizer = Tokenizer(decodable(models.BPE({"a": 0, "b": 10**6}, [])), vocab_size=50)
    assert tokenizer.encode("aa") == [0, 0]
    with pytest.raises(CheckpointError, match="gave id 1000000, but the model has only 50 embeddings"):
        tokenizer.encode("ab")


@pytest.mark.parametrize(
    ("replaced", "times"),
    [([tokenizers.Regex(".")] * 9, 8**9), ([".", " ", "x"], 8**3), ([tokenizers.Regex("."), "12345678", "."], None)],
)
def test_a_normalizer_that_makes_texts_many_times_as_long_is_refused(replaced: list[Any], times: int | None) -> None:
    backend = decodable(models.BPE({"a": 0}, []))
    backend.normalizer = normalizers.Sequence([normalizers.Replace(text, "aaaaaaaa") for text in replaced])
    if times is None:
        assert len(Tokenizer(backend, vocab_size=50).encode("12345678..")) == 80
        return
    with pytest.raises(CheckpointError, match=f"make a text {times} times as long, expected at most 64"):
        Tokenizer(backend, vocab_size=50)


def test_a_charsmap_smaller_than_it_says_is_refused(tmp_path: Path) -> None:
    settings = '{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "' + r"\/" + "/" * 23 + '"}}'
    (tmp_path / "tokenizer.json").write_text(settings)
    with pytest.raises(
        CheckpointError, match=r"a table of 4294967295 bytes, expected a multiple of 4 from 1024 to its own 18\. Get"
    ):
        Tokenizer.from_checkpoint(source(None, 10, tmp_path))


@pytest.mark.parametrize(
    "charsmap",
    [
        b"",
        b"\0\0\0",
        b"\0\0\0\0",
        b"\4\0\0\0\1\2\3",
        b"\4\0\0\0\0\0\0\0abc",
        b"\0\4\0\0" + bytes(1024) + b"\xff",
        b"\1\4\0\0" + bytes(1025),
        b"\0\4\0\0" + b"\0\xfc\7\0" + bytes(1020),  # the root points beyond the table
        b"\0\4\0\0" + b"a\xff\xff\0" * 256,  # and every other entry does
        CHARSMAP[:-4],  # a rule without its text
        CHARSMAP.replace(b"\0e\0", "\xe9".encode() + b"\0"),  # a rule whose text begins inside a character
        "!!!!",
        "AAA",
    ],
)
def test_a_damaged_charsmap_leaves_no_backtrace_on_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], charsmap: bytes | str
) -> None:
    """The library panics at these, and Rust writes that to standard error by itself."""
    text = charsmap if isinstance(charsmap, str) else base64.b64encode(charsmap).decode()
    backend = json.loads(trained("gpt-2").to_str())
    backend["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": text}
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    with pytest.raises(CheckpointError, match=r"precompiled_charsmap .*Get the file again"):
        Tokenizer.from_checkpoint(source(None, 1000, tmp_path))
    assert capfd.readouterr().err == ""


def test_a_charsmap_replaces_characters(tmp_path: Path) -> None:
    backend = json.loads(trained("gpt-2").to_str())
    text = base64.b64encode(CHARSMAP).decode()
    backend["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": text}
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    tokenizer = Tokenizer.from_checkpoint(source(None, 1000, tmp_path))
    assert tokenizer.decode(tokenizer.encode("caf\xe9, \ufb01nd\u2026")) == "cafe, find..."


@pytest.mark.parametrize(
    ("part", "step", "message"),
    [
        ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "x"}, "replaces a text of no char"),
        (
            "normalizer",
            {
                "type": "Sequence",
                "normalizers": [{"type": "NFC"}, {"type": "Replace", "pattern": {"String": ""}, "content": "x"}],
            },
            "replaces a text of no characters",
        ),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "cuts texts into pieces of 0 characters"),
        ("post_processor", {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}],
         "pair": [], "special_tokens": {}}, "adds a second text to a single one"),
        ("post_processor", {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
         "pair": [], "special_tokens": {}}, "adds the token 'x', which its special_tokens do not have"),
    ],
)  # fmt: skip
def test_a_step_at_which_the_library_panics_is_refused_without_its_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], part: str, step: dict[str, Any], message: str
) -> None:
    backend = json.loads(trained("gpt-2").to_str()) | {part: step}
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    with pytest.raises(CheckpointError, match=f"The tokenizer's {part} {message}"):
        Tokenizer.from_checkpoint(source(None, 1000, tmp_path))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("as_text", [False, True])
def test_a_merge_longer_than_any_token_is_refused_without_a_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], indent: int | None, ascii_only: bool, as_text: bool
) -> None:
    """In both forms of the library, with and without escapes. A shorter one that makes no token it names itself."""
    backend = json.loads(trained("gpt-2").to_str())
    model = backend["model"]
    longest = max(model["vocab"], key=lambda token: len(token.encode()))
    merges = model["merges"]

    def load(*added: list[str]) -> Tokenizer:
        pairs = [*merges, *added]
        model["merges"] = [" ".join(pair) for pair in pairs] if as_text else pairs
        text = json.dumps(backend, indent=indent, ensure_ascii=ascii_only)
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        return Tokenizer.from_checkpoint(source(None, 1000, tmp_path))

    assert load().encode("Hello world") == trained("gpt-2").encode("Hello world").ids
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: its merges have .* which make no token"):
        load([longest, "a"])
    with pytest.raises(CheckpointError, match="out of vocabulary"):
        load(["z", "q"])
    assert capfd.readouterr().err == ""


def test_most_files_are_not_read_twice() -> None:
    text = trained("gpt-2").to_str()
    assert not damage._may_have_long_merge(text.encode())
    assert damage._may_have_long_merge(text.replace('"merges":[', '"merges":[["aaaaaaaaaaaaaaaa","a"],').encode())


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer"])
def test_an_expression_that_gives_up_is_an_error_without_a_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], part: str
) -> None:
    pattern = {"pattern": {"Regex": "(a+)+b"}}
    step = {"type": "Replace", "content": "x"} if part == "normalizer" else {"type": "Split", "behavior": "Isolated"}
    split = step | pattern | ({} if part == "normalizer" else {"invert": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(trained("gpt-2").to_str()) | {part: split}))
    tokenizer = Tokenizer.from_checkpoint(source(None, 1000, tmp_path))
    assert tokenizer.encode("hello")
    for text in ("a" * 60, "a" * 4000):
        with pytest.raises(CheckpointError, match=r"The tokenizer failed: .*retry-limit-in-match over"):
            tokenizer.encode(text)
    assert capfd.readouterr().err == ""


def test_what_others_write_meanwhile_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), without_report():
        os.write(2, b"a line of another thread\n")
        os.write(2, b"\nthread '<unnamed>' panicked at x.rs:1\nreason\n")
        raise KeyboardInterrupt  # like a panic no Exception
    with without_report():
        os.write(2, b"another line\n")
    assert capfd.readouterr().err == "a line of another thread\nanother line\n"


def test_usual_expressions_cannot_give_up() -> None:
    """Their texts are encoded without a change to standard error."""
    words = {name: words.expressions for name, words in PRE_TOKENIZERS.items()}
    assert {name for name, texts in words.items() if any(map(damage._NESTED.search, texts))} == {"exaone-moe"}


def decodable(model: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.ByteLevel()
    return backend


def test_unknown_decoder_is_refused_by_name() -> None:
    backend = trained("gpt-2")
    backend.decoder = decoders.CTC()
    with pytest.raises(UnsupportedModelError, match=r"CTC.*supported are byte-level"):
        Tokenizer(backend, vocab_size=1000)
    with pytest.raises(UnsupportedModelError, match="null"):
        Tokenizer(tokenizers.Tokenizer(models.BPE()), vocab_size=1000)


def test_text_that_is_not_unicode_is_refused(sentencepiece: tuple[Tokenizer, dict[str, Any]]) -> None:
    with pytest.raises(UsageError, match=r"character 2 is .*half a surrogate"):
        sentencepiece[0].encode("ab\udcff")
    with pytest.raises(UsageError, match=r"text is b'ab'; expected a string"):
        sentencepiece[0].encode(b"ab")  # type: ignore[arg-type]


def test_ids_that_there_are_not_stand_for_nothing(sentencepiece: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer = sentencepiece[0]
    ids = tokenizer.encode("ab")
    assert tokenizer.decode([-1, *ids, 10**6, 1 << 32, -(1 << 70)]) == tokenizer.decode(ids) == "ab"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "t5"}, UnsupportedModelError, "model 't5' .* is not supported; supported are gpt2"),
        ({"model": None}, UnsupportedModelError, "model None"),
        (
            {"pre": "cuneiform"},
            UnsupportedModelError,
            "pre-tokenizer 'cuneiform', which llmcl does not have",
        ),
        ({"pre": None}, UnsupportedModelError, r"no tokenizer\.ggml\.pre"),
        ({"pre": ["smollm"]}, UnsupportedModelError, "names the pre-tokenizer"),
        ({"tokens": None}, CheckpointError, "tokens is missing"),
        ({"tokens": []}, CheckpointError, "tokens is empty"),
        ({"tokens": [1, 2]}, CheckpointError, "expected a list of strings"),
        ({"merges": None}, CheckpointError, "merges is missing"),
        ({"merges": ["ab"]}, CheckpointError, "expected two tokens with a space"),
        ({"merges": ["no such"]}, CheckpointError, "do not fit together"),
        ({"token_type": np.ones(3, np.int32)}, CheckpointError, "has 3 values, expected 501"),
        ({"token_type": "111"}, CheckpointError, "has a str, expected 501"),
        ({"token_type": ["x"] * 501}, CheckpointError, "expected 501 numbers"),
        ({"add_bos_token": True}, CheckpointError, "bos_token_id is missing"),
        ({"model": "llama"}, CheckpointError, "scores is missing"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    metadata = gguf_of(trained("smollm"), "smollm")
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(error, match=message):
        Tokenizer.from_checkpoint(source(metadata, 501))

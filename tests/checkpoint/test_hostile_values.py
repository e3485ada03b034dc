"""Values that a checkpoint should not have, in its metadata and in its small files: each is refused by name."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_tokenizers import gguf_of, sentencepiece_gguf, trained

from llmcl.checkpoint import open_checkpoint
from llmcl.errors import CheckpointError, LlmclError, UsageError
from llmcl.tokenizer import Tokenizer, gguf_tokenizer

VOCAB = 501  # of made_tokenizers.trained
IDS = {"bos": 1, "eos": 2, "unknown": 0, "padding": 0}
FOR_TERMINALS = "\x1b[2J\u202e\n" + "x" * 1000


def use(path: Path) -> None:
    """Everything of a checkpoint that a command looks at before a device is asked."""
    with open_checkpoint(str(path)) as checkpoint:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        tokenizer.decode(tokenizer.encode("Hello  world it's 123 " + "a" * 40 + "b\n"))
        if tokenizer.has_chat_template:
            tokenizer.encode_chat([{"role": "user", "content": "Hello"}])


def assert_refused(path: Path, message: str, error: type[LlmclError] = CheckpointError) -> None:
    start = time.process_time()
    with pytest.raises(error, match=message) as refusal:
        use(path)
    assert time.process_time() - start < 3
    text = str(refusal.value).replace(str(path), "")
    assert text.isprintable() and len(text) < 500, text


# ---- GGUF ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_with(hf_files, gguf_files, tmp_path_factory) -> Callable[..., Path]:
    """A sound GGUF file but for some metadata."""
    tensors = gguf_files.tensors(hf_files.tensors(vocab_size=VOCAB), {"q_proj": 4, "k_proj": 2})
    made = gguf_of(trained("smollm"), "smollm") | {f"tokenizer.ggml.{key}_token_id": i for key, i in IDS.items()}
    path = tmp_path_factory.mktemp("values") / "model.gguf"

    def write(changes: dict[str, Any]) -> Path:
        changes = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        written: Path = gguf_files.write(path, tensors, metadata={**made, "llama.vocab_size": VOCAB} | changes)
        return written

    return write


def test_the_sound_gguf_file_works(gguf_with):
    use(gguf_with({"tokenizer.chat_template": "{{ bos_token }}{{ pad_token }}{{ messages[0].content }}"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": [1, 2]}, r"tokenizer model ndarray of 2 values .* supported are gpt2"),
        ({"model": ["gpt2"]}, r"tokenizer model \['gpt2'\] .* supported are gpt2"),
        ({"model": 5}, "tokenizer model 5 .* supported are gpt2"),
        ({"model": FOR_TERMINALS}, r"tokenizer model '\\x1b\[2J\\u202e\\nx+\.\.\. \(tokenizer.ggml.model\)"),
        ({"pre": [1.5]}, "the pre-tokenizer ndarray of 1 value, which llmcl does not have"),
        ({"add_bos_token": [True, False]}, "add_bos_token is ndarray of 2 values, expected true or false"),
        ({"add_bos_token": 1}, "add_bos_token is 1, expected true or false"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes', expected true or false"),
        ({"unknown_token_id": 0.5}, "unknown_token_id is 0.5, expected a token id"),
        ({"unknown_token_id": "x"}, "unknown_token_id is 'x', expected a token id"),
        ({"padding_token_id": [1, 2]}, "padding_token_id is ndarray of 2 values, expected a token id"),
        ({"padding_token_id": True}, "padding_token_id is True, expected a token id"),
        ({"bos_token_id": 0.5}, "bos_token_id is 0.5, expected token ids"),
        ({"eos_token_id": [1, 2]}, "eos_token_id is ndarray of 2 values, expected token ids"),
        ({"tokenizer.chat_template": 5}, "tokenizer.chat_template is 5, expected a string"),
        ({"tokenizer.chat_template": ["x"]}, r"tokenizer.chat_template is \['x'\], expected a string"),
        ({"merges": [FOR_TERMINALS]}, r"merges has '\\x1b\[2J\\u202e\\nx+\.\.\., expected two tokens"),
        ({"merges": ["a zzz"]}, "merges do not fit together: 'a' and 'zzz' make no token"),
        (
            {"llama.attention.head_count": FOR_TERMINALS},
            r"head_count is '\\x1b\[2J\\u202e\\nx+\.\.\., expected",
        ),
        ({"llama.rope.freq_base": [1.0]}, "freq_base is ndarray of 1 value, expected a number"),
    ],
)
def test_gguf_metadata_of_another_type_is_refused(gguf_with, changes, message):
    assert_refused(gguf_with(changes), message)


def test_a_damaged_merge_at_which_the_library_panics_is_refused(gguf_with, folder, capfd):
    """A panic of Rust code is no Exception: here of a merge that makes more characters than any token has."""
    longest = max(trained("llama-bpe").get_vocab(), key=len)
    assert_refused(
        gguf_with({"merges": [f"{longest} {longest}"]}),
        f"merges do not fit together: {longest!r} and {longest!r} make no token",
    )
    assert capfd.readouterr().err == ""
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"]["merges"].append([longest, longest])
    path.write_text(json.dumps(values))
    assert_refused(folder, f"its merges have {longest!r} and {longest!r}, which make no token. Get the file again")


def sentencepiece_of(tokens: list[str]) -> dict[str, Any]:
    """A vocabulary of these tokens after the special ones and the bytes."""
    metadata = sentencepiece_gguf()
    head = metadata["tokenizer.ggml.tokens"][:260]
    types = [*metadata["tokenizer.ggml.token_type"][:260].tolist(), *[gguf_tokenizer.NORMAL] * len(tokens)]
    return metadata | {
        "tokenizer.ggml.tokens": [*head, *tokens],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array([0.0] * 260 + [-float(i) for i in range(len(tokens))], np.float32),
    }


def test_a_sentencepiece_token_of_a_megabyte_is_refused_at_once():
    start = time.process_time()
    with pytest.raises(CheckpointError, match=r"a token of 1000000 characters \('aaa.*\.\.\.\), expected at most 1024"):
        gguf_tokenizer.build(sentencepiece_of(["a", "a" * 10**6]))
    assert time.process_time() - start < 1


def test_sentencepiece_tokens_as_long_as_they_may_be_take_linear_time():
    start = time.process_time()
    gguf_tokenizer.build(sentencepiece_of([f"{i:03}".ljust(1024, "x") for i in range(500)]))
    assert time.process_time() - start < 3


def test_sentencepiece_tokens_that_join_in_too_many_ways_are_refused(monkeypatch):
    monkeypatch.setattr(gguf_tokenizer, "_MAX_MERGES", 1000)
    with pytest.raises(CheckpointError, match=r"can be joined in \d+ ways up to 'a+', expected at most 1000 in all"):
        gguf_tokenizer.build(sentencepiece_of(["a" * n for n in range(1, 100)]))


# ---- folders ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(hf_files, tmp_path_factory) -> Path:
    folder: Path = hf_files.write(
        tmp_path_factory.mktemp("folder") / "model", hf_files.tensors(vocab_size=VOCAB), {"vocab_size": VOCAB}
    )
    trained("llama-bpe").save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def folder(sound, tmp_path) -> Path:
    """A sound folder, to be damaged."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in sound.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


SMALL_FILES = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json", "model.safetensors.index.json",
]  # fmt: skip


def merged(old: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The object with some of its entries, and of those in it, in another way."""
    for key, value in changes.items():
        inner = old.get(key)
        old[key] = merged(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return old


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("tokenizer_config.json", {"chat_template": [{"name": {}, "template": "x"}]}, r"a chat_template is \{\}"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": 5}]}, "chat_template is 5"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template is 5, expected a string, or a list"),
        ("chat_template.json", {"chat_template": {}}, r"chat_template is \{\}, expected a string, or a list"),
        ("tokenizer_config.json", {"bos_token": 5}, "bos_token is 5, expected a string, or an object"),
        ("tokenizer_config.json", {"eos_token": {"content": [FOR_TERMINALS]}}, r"eos_token is .*\\x1b.*, expected"),
        ("tokenizer_config.json", {"bos_token": "\ud800"}, r"holds '\\ud800', with half a surrogate pair"),
        ("special_tokens_map.json", {"\udc00": 1}, r"holds '\\udc00', with half a surrogate pair"),
        ("config.json", {"x": [{"y": "a\ud800"}]}, r"config.json holds 'a\\ud800', with half a surrogate pair"),
        ("config.json", {"hidden_size": 10**400}, "hidden_size is a number of 401 digits, expected a whole number"),
        ("config.json", {"architectures": [FOR_TERMINALS]}, r"the architecture \['\\x1b\[2J\\u202e\\nx+\.\.\."),
        ("config.json", {"model_type": FOR_TERMINALS}, r"the architecture '\\x1b\[2J\\u202e\\nx+\.\.\."),
        ("config.json", {"num_experts": [[FOR_TERMINALS] * 9]}, r"num_experts \[\['\\x1b\[2J"),
        ("config.json", {"layer_types": [{"a": FOR_TERMINALS}]}, r"layers of type \{'a': '\\x1b\[2J"),
        ("config.json", {"rope_scaling": {"rope_type": "\x1b]0;x\x07"}}, r"the rotary scaling '\\x1b\]0;x\\x07'"),
        ("generation_config.json", {"eos_token_id": ["a"]}, r"eos_token_id is \['a'\], expected token ids"),
        ("tokenizer.json", {"model": {"merges": [["a", "zzz"]]}}, "as a tokenizer: .*`zzz` out of vocab"),
        ("tokenizer.json", {"model": {"continuing_subword_prefix": "#"}}, "continuing_subword_prefix begins with '#'"),
        ("tokenizer.json", {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "table of 0 bytes"),
        ("tokenizer.json", {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
         "normalizer replaces a text of no characters"),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"},
         "behavior": "Isolated", "invert": False}}, "The tokenizer failed: Onig"),
        ("tokenizer.json", {"post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {},
         "single": [{"SpecialToken": {"id": "x", "type_id": 0}}]}}, "post_processor adds the token 'x', which"),
        ("tokenizer.json", {"decoder": {"type": "CTC", "pad_token": FOR_TERMINALS,
         "word_delimiter_token": "|", "cleanup": True}},
         r"decoder \{\"type\": \"CTC\", \"pad_token\": .*\.\.\. is not supported"),
    ],
)  # fmt: skip
def test_json_values_that_make_no_sense_are_refused(folder, file, changes, message):
    path = folder / file
    values = merged(json.loads(path.read_text()) if path.exists() else {}, changes)
    path.write_text(json.dumps(values))
    assert_refused(folder, message)


def test_a_subword_prefix_with_an_escaped_name_is_refused(folder):
    """It would end the process: the library makes text of half a character of it."""
    path = folder / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    assert '"continuing_subword_prefix"' in text
    text = text.replace('"continuing_subword_prefix"', '"\\u0063ontinuing_subword_prefix"').replace(
        'prefix": null', 'prefix": "#"'
    )
    path.write_text(text, encoding="utf-8")
    assert_refused(folder, "continuing_subword_prefix begins with '#', expected none")


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{{ raise_exception(10**5000) }}", CheckpointError, "Exceeds the limit"),
        ("{{ raise_exception('\\x1b[2J\\n' * 999) }}", UsageError, r"messages: \\x1b\[2J\\n.*\.\.\."),
        ("{{ raise_exception(messages) }}", UsageError, r"messages: \[\{'"),
        ("{{ '\\ud800' }}", CheckpointError, "made a text with half a surrogate pair"),
        ("{{ 10**5000 }}", CheckpointError, "Exceeds the limit"),
        ("{{ messages['\\x1b[2J'].x.y }}", CheckpointError, "The chat template failed"),
    ],
)
def test_templates_cannot_write_what_they_like_into_messages(folder, template, error, message):
    (folder / "chat_template.jinja").write_text(template)
    assert_refused(folder, message, error)


@pytest.mark.parametrize("file", SMALL_FILES)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder, file):
    if file == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    assert_refused(folder, f"{file} is not a regular file")


@pytest.mark.parametrize("file", SMALL_FILES)
def test_a_small_file_of_gigabytes_is_not_read(folder, file):
    if file == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    with (folder / file).open("wb") as sparse:
        sparse.truncate(3 << 30)
    assert_refused(folder, f"{file} has 3221225472 bytes, expected at most")


def test_json_nested_too_deeply_for_a_look_at_its_strings_is_refused(folder):
    depth = sys.getrecursionlimit() - 200
    (folder / "generation_config.json").write_text('{"x": ' + "[" * depth + '"\\u00e9"' + "]" * depth + "}")
    try:
        use(folder)
    except CheckpointError as error:
        assert "nested too deeply" in str(error)


def test_a_file_that_shrinks_after_it_was_opened_is_an_error(sound, folder):
    """To read the bytes that are no longer there would end the process."""
    with open_checkpoint(str(folder)) as checkpoint:
        size = (folder / "model.safetensors").stat().st_size
        os.truncate(folder / "model.safetensors", 4096)
        message = f"the file had {size} bytes when it was opened and has 4096 now"
        for read in (lambda: checkpoint.rows("lm_head.weight", 0, 1), lambda: checkpoint.array("model.norm.weight")):
            with pytest.raises(CheckpointError, match=message):
                read()

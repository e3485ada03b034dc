"""The tokenizer of a folder in Hugging Face format, against the library that its files are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_tokenizers import TEXTS, save_folder, sentencepiece_gguf, source, trained
from tokenizers import decoders

from llmcl.errors import UsageError
from llmcl.tokenizer import Tokenizer
from llmcl.tokenizer.gguf_tokenizer import build


def test_folder_encodes_like_its_tokenizer_json_without_its_padding_and_truncation(tmp_path: Path) -> None:
    tokenizer, original = save_folder(tmp_path), trained("llama-bpe")
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.n_vocab == 501 and not tokenizer.has_chat_template


def test_folder_takes_special_tokens_from_its_settings(tmp_path: Path) -> None:
    tokenizer = save_folder(
        tmp_path,
        bos_token_id=None,
        special_tokens_map__json={"bos_token": "<|end|>", "unk_token": "<|user|>"},
        tokenizer_config__json={
            "bos_token": {"content": "<|user|>", "lstrip": False},
            "eos_token": "<|end|>",
            "chat_template": "{{ bos_token }},{{ eos_token }},{{ unk_token }},{{ pad_token }}",
        },
    )
    assert tokenizer.bos_token_id == 1 and tokenizer.eos_token_ids == {0, 7}
    assert tokenizer.render_chat([{"role": "user", "content": ""}]) == "<|user|>,<|end|>,<|user|>,"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config__json": {"chat_template": "config"}}, "config"),
        (
            {
                "tokenizer_config__json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "no"},
                        {"name": "default", "template": "list"},
                    ]
                }
            },
            "list",
        ),
        (
            {
                "tokenizer_config__json": {"chat_template": "config"},
                "chat_template__json": {"chat_template": "json"},
            },
            "json",
        ),
        ({"chat_template__json": {"chat_template": "json"}, "chat_template__jinja": "jinja"}, "jinja"),
        ({"tokenizer_config__json": {}}, None),
    ],
)
def test_folder_takes_the_chat_template_from_where_transformers_does(
    tmp_path: Path, files: dict[str, Any], expected: str | None
) -> None:
    tokenizer = save_folder(tmp_path, **files)
    assert tokenizer.has_chat_template == (expected is not None)
    if expected is None:
        with pytest.raises(UsageError, match="no chat template"):
            tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    else:
        assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == expected


def test_folder_with_sentencepiece_decodes_like_tokenizers(tmp_path: Path) -> None:
    backend, _ = build(sentencepiece_gguf())
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_checkpoint(source(None, 1000, tmp_path))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == backend.decode(ids) == text
    backend.decoder = decoders.Metaspace()  # the older form of Llama's tokenizer.json
    backend.save(str(tmp_path / "tokenizer.json"))
    older = Tokenizer.from_checkpoint(source(None, 1000, tmp_path))
    ids = older.encode("the end of it")
    assert older.decode(ids) == backend.decode(ids) == "the end of it"

"""The beginning of a text: where BOS stands, and that it stands once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_tokenizers import from_gguf, gguf_of, save_folder, sentencepiece_gguf, sentencepiece_reference, trained

from llmcl.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("model", "stored", "expected"),
    [
        ("llama", None, True),
        ("llama", False, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("smollm", None, False),
    ],
)
def test_bos_is_added_where_the_file_or_its_family_says(model: str, stored: Any, expected: bool) -> None:
    metadata = sentencepiece_gguf() if model == "llama" else gguf_of(trained(model), model)
    metadata.pop("tokenizer.ggml.add_bos_token", None)
    if stored is not None:
        metadata["tokenizer.ggml.add_bos_token"] = stored
    tokenizer = from_gguf(metadata, bos_token_id=1)
    assert (tokenizer.encode("text")[0] == 1) == expected
    assert tokenizer.encode("") == ([1] if expected else [])
    assert tokenizer.encode("text", add_special_tokens=False)[0] != 1


def test_there_is_never_a_second_bos(sentencepiece: tuple[Tokenizer, dict[str, Any]], tmp_path: Path) -> None:
    folder = save_folder(tmp_path, bos_template=True)
    for tokenizer in (sentencepiece[0], folder):
        bos = "<s>" if tokenizer is sentencepiece[0] else "<|user|>"
        once = tokenizer.encode("text")
        assert once.count(1) == 1 and once[0] == 1
        assert tokenizer.encode(bos + "text") == tokenizer.encode(bos + bos + "text") == once
        assert tokenizer.encode("text" + bos)[-1] == 1, "in other places it stays"


def test_chat_template_that_writes_bos_gives_one(sentencepiece: tuple[Tokenizer, dict[str, Any]]) -> None:
    template = "{{ bos_token }}[INST] {{ messages[0].content }} [/INST]{{ eos_token }}"
    metadata = sentencepiece[1] | {"tokenizer.chat_template": template}
    tokenizer = from_gguf(metadata, bos_token_id=1, eos_token_ids=(2,))
    message = [{"role": "user", "content": "Hi"}]
    assert tokenizer.render_chat(message) == "<s>[INST] Hi [/INST]</s>"
    ids = tokenizer.encode_chat(message)
    assert ids == [1, *sentencepiece_reference(metadata, "[INST] Hi [/INST]"), 2]
    assert tokenizer.encode(tokenizer.render_chat(message)) == ids


def test_chat_template_that_writes_no_bos_gives_none_as_in_transformers(
    sentencepiece: tuple[Tokenizer, dict[str, Any]],
) -> None:
    metadata = sentencepiece[1] | {"tokenizer.chat_template": "<|user|>{{ messages[0].content }}"}
    tokenizer = from_gguf(metadata, bos_token_id=1)
    user = metadata["tokenizer.ggml.tokens"].index("<|user|>")
    ids = [user, *sentencepiece_reference(metadata, "Hi")]
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi"}]) == ids
    assert tokenizer.encode("<|user|>Hi") == [1, *ids]

"""Tokens for infilling: named by a GGUF file, or found by the texts that models publish."""

from __future__ import annotations

from typing import Any

import pytest
from made_tokenizers import byte_level_gguf, from_gguf

from llmcl.tokenizer.gguf_tokenizer import CONTROL
from llmcl.tokenizer.infill_tokens import infill_tokens

QWEN = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]


def metadata(tokens: list[str], **keys: Any) -> tuple[dict[str, Any], int]:
    """A vocabulary that ends with these tokens, and the id of the first."""
    made = byte_level_gguf()
    first = len(made["tokenizer.ggml.tokens"])
    made["tokenizer.ggml.tokens"] = [*made["tokenizer.ggml.tokens"], *tokens]
    made["tokenizer.ggml.token_type"] = [*made["tokenizer.ggml.token_type"], *[CONTROL] * len(tokens)]
    return made | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}, first


def test_tokens_are_found_by_their_texts() -> None:
    made, first = metadata(QWEN)
    found = infill_tokens(from_gguf(made))
    assert (found.prefix, found.middle, found.suffix) == (first, first + 1, first + 2) and not found.missing
    assert (found.repository, found.file) == (first + 4, first + 5)
    assert {first + 3, first + 4, first + 5} <= {*found.ends} and not found.suffix_first
    assert found.arranged([1], [2], bos=[0], extra=[3]) == [0, 3, first, 1, first + 2, 2, first + 1]


@pytest.mark.parametrize(
    "keys",
    [
        ("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
        ("prefix_token_id", "suffix_token_id", "middle_token_id"),
    ],
)
def test_tokens_that_a_file_names(keys: tuple[str, ...]) -> None:
    made, first = metadata(["<a>", "<b>", "<c>", "<d>", "<e>", "<f>"])
    for n, key in enumerate((*keys, "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")):
        made[f"tokenizer.ggml.{key}"] = first + n
    found = infill_tokens(from_gguf(made))
    assert (found.prefix, found.suffix, found.middle) == (first, first + 1, first + 2) and not found.missing
    assert (found.repository, found.file) == (first + 4, first + 5) and {*found.ends} == {*range(first + 3, first + 6)}


def test_a_file_is_right_where_texts_differ() -> None:
    made, first = metadata([*QWEN, "<pre>"])
    made |= {"tokenizer.ggml.fim_pre_token_id": first + 6, "tokenizer.ggml.prefix_token_id": first}
    found = infill_tokens(from_gguf(made))
    assert (found.prefix, found.suffix) == (first + 6, first + 2)


@pytest.mark.parametrize("value", [-1, 1 << 31, "<|fim_prefix|>", True, 0.5])
def test_ids_that_are_none_are_left_out(value: Any) -> None:
    made, _ = metadata([], fim_pre_token_id=value)
    assert infill_tokens(from_gguf(made)).prefix is None


def test_what_is_missing_is_said() -> None:
    made, first = metadata(["<a>"])
    assert infill_tokens(from_gguf(made)).missing == (
        "prefix token is missing. suffix token is missing. middle token is missing."
    )
    made["tokenizer.ggml.fim_suf_token_id"] = first
    assert infill_tokens(from_gguf(made)).missing == "prefix token is missing. middle token is missing."
    made, _ = metadata(QWEN[:2])  # a row counts as a whole
    assert infill_tokens(from_gguf(made)).missing.startswith("prefix token is missing. suffix")

"""DRY in whole answers, with breakers from strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from llmcl.engine.dry_breakers import with_breakers
from llmcl.engine.generation import AnswerOptions
from llmcl.engine.llm import LLM
from llmcl.errors import UsageError
from llmcl.ops.dry import Breakers
from llmcl.ops.sample import SamplingParams
from llmcl.reference import samplers

PLAIN: dict[str, Any] = {"raw": True, "ignore_eos": True, "max_tokens": 24}
DRY: dict[str, Any] = {"dry_multiplier": 2.0, "dry_allowed_length": 1, **PLAIN}
PROMPT = "The cat sat on the mat.\nThe cat sat on the mat.\nThe cat sat on"


def breakers_of(llm: LLM, *strings: str) -> Breakers:
    breakers = with_breakers(SamplingParams(dry_multiplier=1.0), strings, llm.tokenizer).dry_breakers
    assert breakers is not None
    return breakers


def tails(breakers: Breakers, head: int) -> list[list[int]]:
    """The tails of the breakers that begin with a token."""
    at, found = abs(int(breakers.heads[head])), []
    if not at:
        return []
    n, at = int(breakers.rules[at]), at + 1
    for _ in range(n):
        length = int(breakers.rules[at])
        found.append(breakers.rules[at + 1 : at + 1 + length].tolist())
        at += 1 + length
    return found


def test_a_token_that_contains_the_string_is_a_breaker(smollm2: LLM) -> None:
    tokenizer = smollm2.tokenizer
    heads = breakers_of(smollm2, "\n", ":").heads
    inside = [i for i in range(tokenizer.n_vocab) if any(byte in tokenizer.token_bytes(i) for byte in (b"\n", b":"))]
    assert np.flatnonzero(heads < 0).tolist() == inside and len(inside) > 50
    assert not np.any(heads > 0)
    end = tokenizer.id_of("<|im_end|>")
    assert end is not None and breakers_of(smollm2, "<|im_end|>").heads[end] < 0


def test_a_token_that_ends_with_the_strings_beginning_needs_the_rest(smollm2: LLM) -> None:
    tokenizer = smollm2.tokenizer
    (name,) = tokenizer.encode(" Alice", False)
    breakers = breakers_of(smollm2, "Alice:", "Alice Cooper")
    after = [tokenizer.encode(":", False), tokenizer.encode(" Cooper", False)]
    assert sorted(tails(breakers, name)) == sorted(after) and breakers.heads[name] > 0
    (comma,) = tokenizer.encode(",", False)
    assert breakers.heads[comma] == 0


def test_breakers_are_found_once_for_a_model(smollm2: LLM) -> None:
    assert breakers_of(smollm2, "x", "y") is breakers_of(smollm2, "x", "y")


@pytest.mark.parametrize("strings", [(), ("\n",), (" cat sat",)], ids=["none", "line_break", "words"])
def test_a_greedy_answer_is_the_twins(smollm2: LLM, strings: Sequence[str]) -> None:
    answer = smollm2.generate(PROMPT, dry_sequence_breakers=strings, **DRY)
    ids, breakers = answer.token_ids, list[tuple[int, ...]]()
    if strings:
        packed = breakers_of(smollm2, *strings)
        breakers = [(int(head), *tail) for head in np.flatnonzero(packed.heads) for tail in tails(packed, int(head))]
    text = [*answer.prompt_token_ids, *ids[:-1]]
    rows = smollm2.logits(text)[len(answer.prompt_token_ids) - 1 :]
    for n, (row, token) in enumerate(zip(rows, ids, strict=True)):
        after = samplers.dry(row, text[: len(answer.prompt_token_ids) + n], 2.0, 1.75, 1, -1, breakers)
        assert after[token] >= np.max(after) - 1e-3
    plain = smollm2.generate(PROMPT, **PLAIN).token_ids
    assert ids != plain


def test_a_conversation_that_goes_on_has_the_text_before(smollm2: LLM) -> None:
    """The sequence in the cache holds the beginning of the prompt, so only the end is read again."""
    sequence = smollm2.model.cache.sequence()
    list(smollm2.stream(PROMPT[:40], sequence=sequence, raw=True, max_tokens=4))
    again = [piece.token_id for piece in smollm2.stream(PROMPT, sequence=sequence, **DRY)]
    assert again == smollm2.generate(PROMPT, **DRY).token_ids


@pytest.mark.parametrize("strings", ["\n", ["a" * 41], [""], [5], ["a"] * 65, ["\ud800"]])
def test_strings_that_cannot_be_breakers(strings: Any) -> None:
    with pytest.raises(UsageError, match=r"dry_sequence_breakers is .* expected a list of up to 64 strings of 1 to 40"):
        AnswerOptions(dry_sequence_breakers=strings)

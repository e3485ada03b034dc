"""`llm.score`: the log-likelihood of answers after a prompt, against the logits of the whole texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmcl.engine.llm import LLM
from llmcl.errors import ContextLengthError, UsageError


def expected(llm: LLM, prompt: list[int], answer: list[int]) -> float:
    rows = llm.logits([*prompt, *answer]).astype(np.float64)[len(prompt) - 1 : -1]
    log_p = rows - np.log(np.sum(np.exp(rows - rows.max(axis=1, keepdims=True)), axis=1, keepdims=True))
    log_p -= rows.max(axis=1, keepdims=True)
    return float(sum(row[token] for row, token in zip(log_p, answer, strict=True)))


def test_answers_of_any_length_are_scored_in_one_call(small_llm: LLM) -> None:
    """More answers than there are lines of results, and in any order; a prompt of one token too."""
    answers = [[5], [6, 7, 8], [5], [9] * 30, *([i % 90] for i in range(70))]
    for prompt in [3], [*range(10, 40)]:
        for answer, score in zip(answers, small_llm.score(prompt, answers), strict=True):
            assert score == pytest.approx(expected(small_llm, prompt, answer), abs=1e-3)


def test_the_prompt_is_read_once(small_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    prefill = small_llm.model.prefill
    monkeypatch.setattr(
        small_llm.model, "prefill", lambda sequence, ids: (read.append(len(ids)), prefill(sequence, ids))
    )
    small_llm.score([*range(20)], [[5], [6], [7]])
    assert read == [19]


@pytest.mark.slow
def test_text_is_cut_into_tokens_as_the_whole_text_is(smollm2: LLM) -> None:
    sea, bread, *_ = smollm2.score("The ship sails on the", [" sea", " bread"], raw=True)
    assert sea > bread + 2
    whole = smollm2.encode("The ship sails on the sea", raw=True)
    before = smollm2.encode("The ship sails on the", raw=True)
    assert sea == pytest.approx(expected(smollm2, before, whole[len(before) :]), abs=1e-3)
    question = "What is the capital of France? Answer with one word."
    scores = smollm2.score(question, ["Paris", "Rome", "Oslo"])
    assert max(scores) == scores[0]
    ids = smollm2.encode(question)
    assert scores[0] == pytest.approx(expected(smollm2, ids, smollm2.tokenizer.encode("Paris", False)), abs=1e-3)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ("text", "answers is 'text'; expected a list of texts"),
        ([], r"answers is \[\]; expected a list of texts"),
        (["a", 5], r"answers\[1\] is 5; expected a text or token ids"),
        (["a", ""], r"answers\[1\] is '', which has no tokens"),
        ([[1], []], r"answers\[1\] is \[\], which has no tokens"),
        ([[10**9]], "token id 1000000000 is not in the vocabulary"),
    ],
)
def test_wrong_answers_are_named(answers: Any, message: str, small_llm: LLM) -> None:
    with pytest.raises(UsageError, match=message):
        small_llm.score("text", answers)


def test_an_answer_that_does_not_fit_is_named(small_llm: LLM) -> None:
    assert len(small_llm.score([1] * 60, [[2] * 5])) == 1
    with pytest.raises(ContextLengthError, match=r"answers\[1\] has 6 tokens after 60 of the prompt, the context 64"):
        small_llm.score([1] * 60, [[2], [2] * 6])

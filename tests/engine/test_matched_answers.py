"""Answers that are to match a grammar, over a batch without a device: each token is of those that may come then."""

from __future__ import annotations

from typing import Any

import pytest
from fake_batch import VOCAB, EveryOther, FakeBatch, FakeLLM, answer_of

from llmcl.engine.engine import Engine
from llmcl.errors import UsageError
from llmcl.ops.sample import SamplingParams

pytestmark = pytest.mark.parametrize("runs_ahead", [False, True], ids=["in step", "runs ahead"])


def opened(runs_ahead: bool, n_pages: int = 40, max_sequences: int = 4) -> tuple[Engine, FakeBatch]:
    batch, llm = FakeBatch(n_pages, max_sequences, runs_ahead=runs_ahead), FakeLLM()
    llm.tokenizer.eos_token_ids = frozenset()
    return Engine(llm, lambda: batch, 64, wait=False), batch  # type: ignore[arg-type]


def prompt(seed: int, n: int = 20) -> list[int]:
    return [(seed * 31 + i * i) % VOCAB for i in range(n)]


def options(seed: int, n_tokens: int, regex: str | None = "every other") -> dict[str, Any]:
    return {"max_tokens": n_tokens, "seed": seed, "temperature": 1.0, "regex": regex}


def expected(seed: int, n_tokens: int, n: int = 20, *, matched: bool = True) -> list[int]:
    return answer_of(prompt(seed, n), SamplingParams(seed=seed), n_tokens, 0, EveryOther() if matched else None)


def test_each_token_may_come_and_the_others_are_as_ever(runs_ahead: bool) -> None:
    """Alone and beside others, through chunks of prompts."""
    engine, _ = opened(runs_ahead)
    with engine:
        assert engine.submit(prompt(1), **options(1, 50)).result().token_ids == expected(1, 50)
        asked = [(seed, 10 + 40 * seed, seed % 3 != 0) for seed in range(9)]
        requests = [
            engine.submit(prompt(seed, n), **options(seed, 30 + seed, "every other" if matched else None))
            for seed, n, matched in asked
        ]
        for (seed, n, matched), request in zip(asked, requests, strict=True):
            assert request.result().token_ids == expected(seed, 30 + seed, n, matched=matched)


def test_after_a_preemption_it_goes_on_where_it_was(runs_ahead: bool) -> None:
    engine, _ = opened(runs_ahead, n_pages=6, max_sequences=3)
    with engine:
        requests = [engine.submit(prompt(seed, 40), **options(seed, 150)) for seed in range(5)]
        for seed, request in enumerate(requests):
            assert request.result().token_ids == expected(seed, 150, 40)
        assert engine.n_preempted > 0


def test_the_device_computes_a_step_while_its_mask_is_made(runs_ahead: bool) -> None:
    """The step is enqueued before the mask, and on a device that runs ahead also before the id before it is read."""
    engine, batch = opened(runs_ahead)
    with engine:
        engine.submit(prompt(1), **options(1, 20)).result()
        start = batch.log.index("decode")
        a_step = ["decode", "read", "allow"] if runs_ahead else ["decode", "allow", "read"]
        assert batch.log[start : start + 45] == a_step * 15


def test_an_answer_ends_while_the_step_after_is_being_enqueued(runs_ahead: bool) -> None:
    """At a text that nobody foresaw: its place and pages go once the step is, and its log-probabilities are there."""
    engine, batch = opened(runs_ahead)
    with engine:
        asked = [(seed, expected(seed, 40)) for seed in range(8)]
        texts = [engine.submit(prompt(seed), **options(seed, 40)).result().text for seed, _ in asked]
        requests = [
            engine.submit(prompt(seed), logprobs=1, stop=[text[8 + seed : 11 + seed]], **options(seed, 40))
            for (seed, _), text in zip(asked, texts, strict=True)
        ]
        for (_, ids), text, request in zip(asked, texts, requests, strict=True):
            answer = request.result()
            assert answer.finish_reason == "stop" and 0 < len(answer.text) <= 15 and text.startswith(answer.text)
            assert answer.token_ids == ids[: len(answer.token_ids)]
        assert batch.cache.n_free == len(batch.cache.order) and not batch.places


def test_a_matcher_that_fails_ends_its_own_answer(runs_ahead: bool) -> None:
    engine, _ = opened(runs_ahead)
    with engine:
        bad = engine.submit(prompt(2), **options(2, 50, "every other 7"))
        at_once = engine.submit(prompt(3), **options(3, 50, "every other 0"))
        good = engine.submit(prompt(1), **options(1, 50))
        found = []
        with pytest.raises(UsageError, match="it fails after 7 tokens"):
            for piece in bad:
                found.append(piece.token_id)
        assert found == expected(2, 7)
        with pytest.raises(UsageError, match="it fails after 0 tokens"):
            at_once.result()
        assert good.result().token_ids == expected(1, 50)
        cut = engine.submit(prompt(2), **options(2, 7, "every other 7"))  # its last token is the last that may come
        assert cut.result().token_ids == expected(2, 7)

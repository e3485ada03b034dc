"""`logits_processor=` and `n=`: a function on the host changes the logits; several answers to one prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmcl.engine.llm import LLM
from llmcl.engine.scheduler import Job
from llmcl.errors import UsageError
from llmcl.ops.sample import SamplingParams

PROMPT = [5, 9, 13, 7]
GREEDY: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
SAMPLED: dict[str, Any] = {**GREEDY, "temperature": 1.2, "seed": 5}


class Recorder:
    """Notes what it is asked, and changes nothing."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], np.ndarray]] = []

    def __call__(self, token_ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        self.asked.append((token_ids.tolist(), logits.copy()))
        return logits


def without(*banned: int) -> Any:
    def process(token_ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        logits[list(banned)] = -np.inf
        return logits

    return process


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_it_sees_the_text_so_far_and_the_logits_after_it(options: dict[str, Any], small_llm: LLM) -> None:
    plain = small_llm.generate(PROMPT, **options)
    recorder = Recorder()
    answer = small_llm.generate(PROMPT, logits_processor=recorder, **options)
    assert answer.token_ids == plain.token_ids
    text = [*PROMPT, *answer.token_ids]
    assert [ids for ids, _ in recorder.asked] == [text[: len(PROMPT) + i] for i in range(6)]
    rows = small_llm.logits(text)[len(PROMPT) - 1 : -1]
    np.testing.assert_allclose([logits for _, logits in recorder.asked], rows, atol=1e-4)


def test_the_logits_are_counted_in_the_traffic(small_llm: LLM) -> None:
    """Both ways, for each token; without a processor a token is 4 bytes."""
    moved = []
    for processor in None, Recorder():
        before = small_llm.device.traffic.copy()
        small_llm.generate(PROMPT, logits_processor=processor, **GREEDY)
        moved.append(small_llm.device.traffic.since(before))
    more = 6 * 4 * small_llm.config.vocab_size
    assert moved[0].device_to_host_bytes <= 6 * 4
    assert moved[1].device_to_host_bytes - moved[0].device_to_host_bytes == more
    assert moved[1].host_to_device_bytes - moved[0].host_to_device_bytes == more


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_what_it_rules_out_never_comes(options: dict[str, Any], small_llm: LLM) -> None:
    banned = small_llm.generate(PROMPT, **options).token_ids
    changed = small_llm.generate(PROMPT, logits_processor=without(*banned), **options).token_ids
    assert not {*changed} & {*banned}
    assert changed == small_llm.generate(PROMPT, logit_bias=dict.fromkeys(banned, -10_000), **options).token_ids


def test_it_goes_with_a_grammar_and_log_probabilities(small_llm: LLM) -> None:
    assert small_llm.tokenizer is not None
    a = small_llm.tokenizer.encode("a", False)
    answer = small_llm.generate("text", choices=["a", "b"], logits_processor=without(*a), logprobs=0)
    assert answer.text == "b" and len(answer.logprobs) == len(answer.token_ids)


def test_each_of_several_texts_has_its_own(small_llm: LLM) -> None:
    """Prompts of other lengths, more than there are places, beside answers without one."""
    banned = small_llm.generate(PROMPT, **GREEDY).token_ids[:2]
    prompts = [PROMPT[: 1 + i % 4] for i in range(10)]
    alone = [small_llm.generate(prompt, logits_processor=without(*banned), **GREEDY).token_ids for prompt in prompts]
    together = small_llm.generate(prompts, logits_processor=without(*banned), **GREEDY)
    assert [answer.token_ids for answer in together] == alone
    with small_llm.engine(max_sequences=3, max_context=64) as engine:
        requests = [
            engine.submit(prompt, logits_processor=without(*banned) if i % 2 else None, **GREEDY)
            for i, prompt in enumerate(prompts)
        ]
        found = [request.result().token_ids for request in requests]
    plain = [small_llm.generate(prompt, **GREEDY).token_ids for prompt in prompts]
    assert found == [alone[i] if i % 2 else plain[i] for i in range(10)]


def test_no_draft_is_verified_beside_one() -> None:
    assert Job(PROMPT, SamplingParams(), 5).drafts
    assert not Job(PROMPT, SamplingParams(), 5, processor=Recorder()).drafts


def fails(token_ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
    raise KeyError("x")


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (5, "logits_processor is 5; expected a function"),
        (fails, "logits_processor failed after token 4 of the text: KeyError: 'x'"),
        (lambda ids, logits: None, r"logits_processor returned None; expected an array of numbers \[\d+\]"),
        (lambda ids, logits: logits[:3], r"logits_processor returned float32 \[3\]; expected an array"),
        (lambda ids, logits: logits > 0, r"logits_processor returned bool \[\d+\]; expected an array of numbers"),
        (lambda ids, logits: logits * np.nan, "logits_processor returned a logit of nan; expected finite numbers"),
        (lambda ids, logits: logits - np.inf, "returned nothing but -inf, so that no token is left"),
        (lambda ids, logits: logits.astype(np.float64) + 1e300, "returned a logit of inf"),
    ],
)
def test_what_is_no_processor_is_named(processor: Any, message: str, small_llm: LLM) -> None:
    for prompt in PROMPT, [PROMPT, PROMPT]:
        with pytest.raises(UsageError, match=message):
            small_llm.generate(prompt, logits_processor=processor, **GREEDY)  # type: ignore[call-overload]
    assert len(small_llm.generate(PROMPT, **GREEDY).token_ids) == 6


# ---- several answers ---------------------------------------------------------------------------------------------


def test_several_answers_to_a_prompt_draw_with_seeds_that_count_up(small_llm: LLM) -> None:
    answers = small_llm.generate(PROMPT, n=10, **SAMPLED)
    seeds = [{**SAMPLED, "seed": 5 + i} for i in range(10)]
    assert [a.token_ids for a in answers] == [small_llm.generate([PROMPT], **options)[0].token_ids for options in seeds]
    assert len({tuple(answer.token_ids) for answer in answers}) > 5
    assert [len(small_llm.generate("text", n=n, max_tokens=1)) for n in (1, 3)] == [1, 3]


def test_several_answers_stream_with_their_numbers(small_llm: LLM) -> None:
    whole = [answer.token_ids for answer in small_llm.generate(PROMPT, n=3, **SAMPLED)]
    streamed: list[list[int]] = [[], [], []]
    for i, piece in small_llm.stream(PROMPT, n=3, **SAMPLED):
        streamed[i].append(piece.token_id)
    assert streamed == whole
    free = small_llm.generate(PROMPT, n=4, temperature=1.5, max_tokens=8, ignore_eos=True)
    assert len({tuple(answer.token_ids) for answer in free}) > 1
    last = small_llm.generate(PROMPT, n=2, **{**SAMPLED, "seed": (1 << 64) - 1})
    assert last[1].token_ids == small_llm.generate([PROMPT], **{**SAMPLED, "seed": 0})[0].token_ids


@pytest.mark.slow
def test_the_prompt_of_several_answers_is_read_once(smollm2: LLM) -> None:
    """But for what does not fill a page."""
    prompt = [*range(100, 300)]
    answers = smollm2.generate(prompt, n=3, temperature=1.0, seed=1, max_tokens=3)
    assert [answer.stats.cached_tokens for answer in answers] == [0, 192, 192]


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", 1025, 10**400])
def test_what_is_no_number_of_answers_is_refused(n: Any, small_llm: LLM) -> None:
    for ask in small_llm.generate, small_llm.stream:
        with pytest.raises(UsageError, match=r"n is .*; expected"):
            ask(PROMPT, n=n)


def test_several_answers_are_to_one_prompt(small_llm: LLM) -> None:
    with pytest.raises(UsageError, match="n is 2 with a list of prompts; expected 1 to 1024 answers to one prompt"):
        small_llm.generate([PROMPT, PROMPT], n=2)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="max_tokens is 0"):
        small_llm.generate(PROMPT, n=2, max_tokens=0)
    assert len(small_llm.generate(PROMPT, n=2, max_tokens=1)) == 2

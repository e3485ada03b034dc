"""The engine with a model: in float32 each answer is that of the request alone, preempted or not."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import random_weights, save_folder, small_config
from late_kernels import compile_when_used

import llmcl
from llmcl.engine.llm import LLM
from llmcl.errors import UsageError
from llmcl.runtime.platforms import DeviceEntry

compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 40,
    "top_p": 0.95,
    "repeat_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "seed": 5,
}
MIROSTAT: dict[str, Any] = {"temperature": 1.5, "mirostat": 2, "mirostat_tau": 1.0, "seed": 8}

DRY: dict[str, Any] = {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_base": 1.4}


@pytest.fixture(scope="module")
def llm(either_entry: DeviceEntry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_folder(tmp_path_factory.mktemp("small"), small_config(), random_weights(small_config(), seed=7))
    with llmcl.load(str(folder), device=either_entry, max_context=384) as llm:  # type: ignore[arg-type]
        yield llm


def prompts(n: int) -> list[list[int]]:
    """Of different lengths, some with the same beginning."""
    rng = np.random.default_rng(0)
    first = rng.integers(3, 99, 130).tolist()
    return [[*first[: 130 * (i % 2)], *rng.integers(3, 99, 3 + 17 * i).tolist()] for i in range(n)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow, id="greedy"),
        pytest.param(SAMPLED, id="sampled"),
        pytest.param(MIROSTAT, marks=pytest.mark.slow, id="mirostat"),
        pytest.param(DRY, id="dry"),
    ],
)
def test_answers_are_those_of_each_request_alone(options: dict[str, Any], llm: LLM) -> None:
    if options == MIROSTAT and not llm.device.is_cpu:
        pytest.skip("the samplers are the same kernels, which a processor compiles for 10 s as a GPU's")
    asked = prompts(7)
    options = {"max_tokens": 80, "ignore_eos": True, **options}
    alone = [llm.generate(prompt, **options).token_ids for prompt in asked]
    assert [answer.token_ids for answer in llm.generate(asked, **options)] == alone
    found: list[list[int]] = [[] for _ in asked]
    with llm.engine(max_sequences=3, max_step_tokens=50, kv_pages=6) as engine:
        for i, piece in engine.stream_each(asked, **options):
            found[i].append(piece.token_id)

        async def tasks() -> list[list[int]]:
            async def task(prompt: list[int]) -> list[int]:
                return [piece.token_id async for piece in engine.stream(prompt, **options)]

            return await asyncio.gather(*map(task, asked))

        assert found == alone == asyncio.run(tasks())
        assert engine.n_preempted > 0
        for prompt in asked:
            engine.submit(prompt, **options)  # nobody wants to know
        with pytest.raises(UsageError, match="is open and has it until it is closed"):
            llm.generate(asked[0])
    assert llm.generate(asked[0], **options).token_ids == alone[0]


def test_a_closed_engine_gives_its_memory_back(llm: LLM) -> None:
    llm.generate(prompts(1)[0], max_tokens=2)  # what the model makes when it is first used
    before = llm.device.allocated_bytes
    for _ in range(2):
        with llm.engine(max_sequences=2) as engine:
            engine.generate(prompts(2), max_tokens=3)
            assert llm.device.allocated_bytes > before
        del engine
        gc.collect()
        assert llm.device.allocated_bytes == before


def test_log_probabilities_and_biases(llm: LLM) -> None:
    asked = prompts(3)
    with llm.engine(max_sequences=2) as engine:
        plain = engine.submit(asked[0], max_tokens=8, ignore_eos=True)
        wanted = [engine.submit(prompt, max_tokens=8, ignore_eos=True, logprobs=3) for prompt in asked]
        pieces = [list(request) for request in wanted]
        first = pieces[0][0].token_id
        biased = engine.submit(asked[0], max_tokens=8, ignore_eos=True, logit_bias={first: -100.0})
        assert biased.result().token_ids[0] == pieces[0][0].logprob.top[1][0]  # type: ignore[union-attr]
        assert all(piece.logprob is None for piece in plain)
        with pytest.raises(UsageError, match="token id 9999 is not in the vocabulary"):
            engine.submit(asked[0], logit_bias={9999: 1.0})
    pieces.append(list(llm.stream(asked[0], max_tokens=8, ignore_eos=True, logprobs=3)))  # without an engine
    without = llm.generate(asked[0], max_tokens=1, logit_bias={first: -100.0})
    assert without.token_ids == [pieces[0][0].logprob.top[1][0]]  # type: ignore[union-attr]
    for prompt, found in zip([*asked, asked[0]], pieces, strict=True):
        ids = [piece.token_id for piece in found]
        rows = llm.logits([*prompt, *ids[:-1]])[len(prompt) - 1 :].astype(np.float64)
        log_p = rows - np.log(np.sum(np.exp(rows), axis=1, keepdims=True))
        for piece, row in zip(found, log_p, strict=True):
            assert piece.logprob is not None
            assert piece.logprob.logprob == pytest.approx(row[piece.token_id], abs=1e-4)
            assert [p for _, p in piece.logprob.top] == pytest.approx(np.sort(row)[::-1][:3], abs=1e-4)


def test_log_probabilities_of_prompts(llm: LLM) -> None:
    asked = [*prompts(6), [5]]
    options: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
    found = []
    with llm.engine(max_sequences=3, max_step_tokens=100, kv_pages=9) as engine:
        beside = [engine.submit(prompt, **options) for prompt in asked]
        for top in (0, 3):
            requests = [engine.submit(prompt, **options, prompt_logprobs=top, logprobs=top) for prompt in asked]
            found.append([list(request) for request in requests])
        answers = [request.result().token_ids for request in beside]
    for pieces in found:
        assert [[piece.token_id for piece in of_one] for of_one in pieces] == answers
    for n, prompt in enumerate(asked):
        rows = llm.logits(prompt).astype(np.float64)
        log_p = rows - np.log(np.sum(np.exp(rows), axis=1, keepdims=True))
        for top, pieces in zip((0, 3), found, strict=True):
            of_prompt = pieces[n][0].prompt_logprobs
            assert of_prompt is not None and len(of_prompt) == len(prompt) and of_prompt[0] is None
            assert all(piece.prompt_logprobs is None for piece in pieces[n][1:])
            without = llm.logprobs(prompt, top=top)
            for scored in of_prompt[1:], without:
                for logprob, token, row in zip(scored, prompt[1:], log_p, strict=False):
                    assert logprob is not None and logprob.token == token
                    assert logprob.logprob == pytest.approx(row[token], abs=1e-4)
                    assert [p for _, p in logprob.top] == pytest.approx(np.sort(row)[::-1][:top], abs=1e-4)
                    assert [row[i] for i, _ in logprob.top] == pytest.approx(np.sort(row)[::-1][:top], abs=1e-4)
    for token_ids, top, words in (([], 0, "no tokens"), ([5, 6], 21, "top is 21"), ("text", 0, "expected token ids")):
        with pytest.raises(UsageError, match=words):
            llm.logprobs(token_ids, top=top)  # type: ignore[arg-type]


def test_a_list_of_prompts_streams_with_indices(llm: LLM) -> None:
    asked = prompts(3)
    pieces = list(llm.stream(asked, max_tokens=5, ignore_eos=True))
    for i, prompt in enumerate(asked):
        assert [piece.token_id for index, piece in pieces if index == i] == llm.generate(
            prompt, max_tokens=5, ignore_eos=True
        ).token_ids
    with pytest.raises(UsageError, match="prompt 1: the prompt has no tokens"):
        llm.stream([asked[0], []])
    for sizes, match in (
        ({"max_sequences": 0}, "max_sequences is 0"),
        ({"max_sequences": 10**6}, "max_sequences is 1000000"),
        ({"max_step_tokens": 2}, "max_step_tokens is 2 with 8 sequences"),
        ({"max_context": 385}, "max_context is 385; expected at most the model's 384"),
        ({"kv_page_tokens": 48}, "48 tokens a page"),
    ):
        with pytest.raises(UsageError, match=match):
            llm.engine(**sizes)  # type: ignore[arg-type]
    assert len(llm.generate(asked[0], max_tokens=2).token_ids) <= 2

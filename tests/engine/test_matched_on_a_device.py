"""Answers of a model that match a schema, an expression or a grammar: alone, in an engine, and with speculation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import random_weights, save_folder, small_config

import llmcl
from llmcl.engine.llm import LLM
from llmcl.engine.speculation import NO_SPECULATION
from llmcl.errors import UsageError
from llmcl.grammar import Grammar
from llmcl.ops.sample import SamplingParams
from llmcl.runtime.platforms import DeviceEntry
from llmcl.speculation.draft_length import FixedLength
from llmcl.speculation.drafters import Drafter, PromptLookup
from llmcl.speculation.drafting import Drafting

EXPRESSION = "([a-f]{1,9}[0-9]{2} ){3,8}[.!]"
SAMPLED: dict[str, Any] = {"temperature": 1.5, "seed": 5, "repeat_penalty": 1.1}
PROMPT = "abc"


@pytest.fixture(scope="module")
def llm(either_entry: DeviceEntry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Of random weights."""
    folder = save_folder(tmp_path_factory.mktemp("small"), small_config(), random_weights(small_config(), seed=7))
    with llmcl.load(str(folder), device=either_entry, max_context=384) as llm:  # type: ignore[arg-type]
        yield llm


@pytest.fixture(autouse=True)
def plain_again(llm: LLM) -> Iterator[None]:
    yield
    llm.speculation = NO_SPECULATION


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_an_answer_matches(options: dict[str, Any], llm: LLM) -> None:
    found = llm.generate(PROMPT, regex=EXPRESSION, **options)
    assert re.fullmatch(EXPRESSION, found.text) and found.finish_reason == "stop"
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "n": {"type": "integer", "maximum": 99}}}
    schema |= {"required": ["a", "n"], "additionalProperties": False}
    value = json.loads(llm.generate(PROMPT, schema=schema, **options).text)
    assert value["a"] in ("x", "yy") and value["n"] <= 99 and len(value) == 2
    assert llm.generate(PROMPT, grammar='start: "<" /[a-z]{3}/ ">"', **options).text[4] == ">"
    cut = llm.generate(PROMPT, regex=EXPRESSION, max_tokens=5, **options)
    assert cut.finish_reason == "length" and cut.text == found.text[:5]
    assert llm.generate(PROMPT, max_tokens=20, **options).text == llm.generate(PROMPT, max_tokens=20, **options).text


def test_a_token_is_the_best_that_may_come(llm: LLM) -> None:
    """Masks change which tokens are compared, and nothing else."""
    found = llm.generate(PROMPT, regex=EXPRESSION)
    matcher = llm.grammars.compile(Grammar("regex", EXPRESSION)).matcher()
    rows = llm.logits([*found.prompt_token_ids, *found.token_ids[:-1]])[len(found.prompt_token_ids) - 1 :]
    for token, row in zip(found.token_ids, rows, strict=True):
        allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
        assert row[token] >= row[allowed].max() - 1e-4
        matcher.accept([token])


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow, id="greedy"), pytest.param(SAMPLED, id="sampled")]
)
def test_an_engine_gives_what_each_would_get_alone(options: dict[str, Any], llm: LLM) -> None:
    """Beside answers that match nothing, with places that change hands."""
    asked = [{"regex": EXPRESSION}, {}, {"regex": "[xyz]{20,40}"}, {"regex": EXPRESSION, "logprobs": 2}, {}, {}]
    texts = [f"{PROMPT}{n}" * (1 + 9 * (n % 3)) for n in range(len(asked))]
    alone = [
        llm.generate(text, **{"max_tokens": 60, **given, **options}) for text, given in zip(texts, asked, strict=True)
    ]
    with llm.engine(max_sequences=3, max_step_tokens=16) as engine:
        requests = [
            engine.submit(text, **{"max_tokens": 60, **given, **options})
            for text, given in zip(texts, asked, strict=True)
        ]
        assert [request.result().token_ids for request in requests] == [answer.token_ids for answer in alone]
        with pytest.raises(UsageError, match="regex is refused"):
            engine.submit(PROMPT, regex="(")


class Knows(Drafter):
    """Drafts an answer that it knows, with a wrong token now and then: one that may not come, or one that may."""

    is_free = True

    def __init__(self, answer: Sequence[int], wrong: int):
        self.answer = answer
        self.wrong = wrong

    def begin(self, text: Sequence[int], params: SamplingParams) -> None:
        self.n = 0

    def push(self, token: int) -> None:
        self.n += 1

    def draft(self, unread: int, most: int) -> list[int]:
        following = [self.wrong if n % 7 == 3 else token for n, token in enumerate(self.answer)]
        return following[self.n + unread :][:most]


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["right and not", "right and may", "lookup"])
def test_speculation_gives_the_same_tokens(drafter: str, options: dict[str, Any], llm: LLM) -> None:
    plain = llm.generate(PROMPT, regex=EXPRESSION, **options)
    drafters = {
        "right and not": lambda: Knows(plain.token_ids, 98),
        "right and may": lambda: Knows(plain.token_ids, plain.token_ids[0]),
        "lookup": PromptLookup,
    }
    llm.speculation = Drafting(llm.model, drafters[drafter](), FixedLength(5))
    drafted = llm.generate(PROMPT, regex=EXPRESSION, **options)
    assert drafted.token_ids == plain.token_ids and drafted.finish_reason == "stop"
    if drafter.startswith("right"):
        assert drafted.stats.tokens_per_step is not None and drafted.stats.tokens_per_step > 1.5
    after = llm.generate(PROMPT, max_tokens=30, **options)
    llm.speculation = NO_SPECULATION
    assert after.token_ids == llm.generate(PROMPT, max_tokens=30, **options).token_ids


def test_what_is_refused(llm: LLM) -> None:
    for options, message in (
        ({"regex": "("}, "regex is refused"),
        ({"regex": "a", "schema": {}}, "schema and regex both say"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos and regex exclude each other"),
    ):
        with pytest.raises(UsageError, match=message):
            llm.generate(PROMPT, **options)


def test_a_grammar_that_becomes_too_costly_ends_the_answer(llm: LLM) -> None:
    with pytest.raises(UsageError, match=r"grammar cannot be followed any further: .*make it simpler"):
        list(
            llm.stream(
                PROMPT, grammar="start: a0\n" + "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(25)) + 'a25: "x"\n'
            )
        )
    assert llm.generate(PROMPT, max_tokens=2).token_ids

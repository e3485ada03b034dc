"""The DRY sampler's logits against the float64 twin, and the twin against llama.cpp's tests/test-sampling.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from helpers import run, with_poison

from llmcl.errors import UsageError
from llmcl.kernels.common.step_state import StepState
from llmcl.ops.dry import MAX_PENALTY, Breakers
from llmcl.ops.sample import Sampler, SamplingParams
from llmcl.reference import penalize, samplers
from llmcl.reference.arrays import Array
from llmcl.runtime.device import Device

VOCAB, CONTEXT = 131, 700
Sequences = Sequence[tuple[int, ...]]


def shares(logits: Array) -> list[float]:
    weights = np.exp(logits - np.max(logits))
    return [float(share) for share in weights / np.sum(weights)]


@pytest.mark.parametrize(
    ("n", "text", "options", "breakers", "lowered"),
    [
        (4, [0, 1], (1.0, 1.1, 2, 4), [], {}),
        (4, [0, 1, 2, 0, 1], (1.0, 1.1, 2, 5), [], {2: 0.109232}),
        (5, [0, 1, 3, 4, 0, 1], (1.0, 1.1, 2, 6), [(3,)], {}),
        (5, [0, 1, 2, 0, 1], (2.0, 1.1, 2, 5), [], {2: 0.032727}),
        (5, [0, 1, 2, 3, 4, 0, 1], (1.0, 1.1, 4, 7), [], {}),
    ],
)
def test_the_twin_has_llama_cpps_values(
    n: int, text: list[int], options: tuple[float, float, int, int], breakers: Sequences, lowered: dict[int, float]
) -> None:
    found = shares(samplers.dry(np.zeros(n), text, *options, breakers))
    rest = (1 - sum(lowered.values())) / (n - len(lowered))
    assert found == pytest.approx([lowered.get(token, rest) for token in range(n)], abs=1e-5)


def test_the_example_in_llama_cpps_source() -> None:
    """a b c c b c y a b c: c extends a repetition of three tokens, y one of two, b one of one."""
    a, b, c, y = range(4)
    logits = samplers.dry(np.zeros(4), [a, b, c, c, b, c, y, a, b, c], 1.0, 2.0, 1)
    assert logits.tolist() == [0.0, -1.0, -4.0, -2.0]


def texts(kind: str, n: int) -> list[int]:
    rng = np.random.default_rng(n)
    if kind == "two":
        return [int(token) for token in rng.integers(3, 5, n)]
    if kind == "same":
        return [9] * n
    phrase = [int(token) for token in rng.integers(3, VOCAB, 17)]
    return [*phrase * (n // 17), *phrase[: n % 17]]


class Bench:
    """A sampler for one sequence, which begins with a prompt."""

    def __init__(self, device: Device, prompt: Sequence[int], params: SamplingParams):
        self.device, self.params = device, params
        self.text = [*prompt]
        self.logits = (3.0 * np.random.default_rng(5).standard_normal(VOCAB)).astype(np.float32)
        self.step = StepState(device, 1)
        self._buffer = with_poison(device, self.logits)
        self.sampler = Sampler(device, self._buffer, VOCAB, self.step, CONTEXT)
        self.sampler.configure(params)
        self.sampler.dry.remember(prompt)
        self.step.write_tokens([prompt[-1]], len(prompt) - 1)

    def append(self, token: int) -> None:
        """The step's input is this token; the host tells the device only that."""
        self.step.write_tokens([token], len(self.text))
        self.text.append(token)

    def changed(self) -> Array:
        self.device.write(self._buffer, self.logits)
        run(self.sampler.dry.launches)
        return self.device.read(self._buffer, np.float32, (VOCAB,))

    def expected(self, breakers: Sequences = ()) -> Array:
        p = self.params
        return samplers.dry(
            self.logits, self.text, p.dry_multiplier, p.dry_base, p.dry_allowed_length, p.dry_penalty_last_n, breakers
        )


OPTIONS: list[dict[str, Any]] = [
    {},
    {"dry_allowed_length": 0, "dry_base": 1.0},
    {"dry_allowed_length": 5, "dry_base": 1.05},
    {"dry_penalty_last_n": 40},
    {"dry_penalty_last_n": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["usual", "none_allowed", "five_allowed", "window", "one"])
@pytest.mark.parametrize("kind", ["two", "same", "phrase"])
def test_logits_are_the_twins_from_token_to_token(target: Device, kind: str, options: dict[str, Any]) -> None:
    text = texts(kind, 330)
    bench = Bench(target, text[:300], SamplingParams(dry_multiplier=0.8, **options))
    np.testing.assert_allclose(bench.changed(), bench.expected(), rtol=2e-5, atol=2e-5)
    for token in text[300:]:
        bench.append(token)
        np.testing.assert_allclose(bench.changed(), bench.expected(), rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(bench.changed(), bench.changed())  # a step that is repeated


@pytest.mark.parametrize(
    "breakers",
    [
        [(4,)],
        pytest.param([(3, 4, 4), (3, 4), (4, 4, 3)], marks=pytest.mark.oclgrind("portable")),  # all variants share it
        [(3,), (3, 4, 3, 4)],
        [(90,)],
    ],
)
def test_breakers(target: Device, breakers: Sequences) -> None:
    params = SamplingParams(dry_multiplier=0.5, dry_allowed_length=1, dry_breakers=Breakers.of(breakers, VOCAB))
    text = texts("two", 90)
    bench = Bench(target, text[:5], params)
    lowered = 0
    for token in text[5:]:
        bench.append(token)
        expected = bench.expected(breakers)
        np.testing.assert_allclose(bench.changed(), expected, rtol=2e-5, atol=2e-5)
        lowered += not np.array_equal(expected, bench.expected())
    assert (lowered > 0) == (breakers != [(90,)])


def test_breakers_that_need_too_much_room() -> None:
    with pytest.raises(UsageError, match="expected fewer or shorter strings"):
        Breakers.of([(5, *[tail] * 19) for tail in range(300)], VOCAB)


def test_dry_follows_the_penalties(target: Device) -> None:
    """The chosen token is the one with the largest logit after repetition penalty and DRY, in this order."""
    params = SamplingParams(dry_multiplier=1.5, repeat_penalty=1.7, repeat_window=20)
    text = texts("two", 60)
    bench = Bench(target, text, params)
    bench.sampler.remember(text)
    bench.logits[3:5] = 9.0, -2.0  # one above and one below 0, and both extend a repetition
    seen = np.full(VOCAB, -1)
    seen[text] = np.arange(60)
    bench.logits[7] = float(bench.expected()[3]) / 1.7  # between the right logit and the one in the other order
    after = samplers.dry(penalize(bench.logits, seen, 59, 20, 1.7), text, 1.5, 1.75, 2)
    bench.changed()
    run(bench.sampler.launches_for()[1:])
    token = int(bench.device.read(bench.step.sampled, np.int32, (1,))[0])
    assert token == int(np.argmax(after))


def test_a_penalty_stays_finite(target: Device) -> None:
    bench = Bench(target, [5] * 600, SamplingParams(dry_multiplier=2.0, dry_base=2.0))
    assert bench.changed()[5] == pytest.approx(bench.logits[5] - MAX_PENALTY)
    bench.append(5)
    assert bench.changed()[5] == pytest.approx(bench.logits[5] - MAX_PENALTY)


def test_rows_have_their_own_texts_and_settings(target: Device) -> None:
    params = [
        SamplingParams(dry_multiplier=1.0, dry_breakers=Breakers.of([(4,)], VOCAB)),
        SamplingParams(seed=1),
        SamplingParams(dry_multiplier=2.0, dry_allowed_length=1, dry_penalty_last_n=30),
    ]
    prompts = [texts("two", 50), texts("phrase", 40), texts("phrase", 70)]
    logits = np.random.default_rng(1).standard_normal((3, VOCAB)).astype(np.float32)
    step, buffer = StepState(target, 3, 0, 3), with_poison(target, logits)
    sampler = Sampler(target, buffer, VOCAB, step, CONTEXT)
    for place, (each, prompt) in enumerate(zip(params, prompts, strict=True)):
        sampler.configure(each, place)
        step.write_sequence(place, len(prompt) - 1, 0)
        if each.repels:
            sampler.dry.remember(prompt, place)
    step.write_rows([2, 0, 1], 0)
    run(sampler.launches_for([2, 0, 1])[:1], 3)
    found = target.read(buffer, np.float32, (3, VOCAB))
    np.testing.assert_allclose(found[0], samplers.dry(logits[0], prompts[2], 2.0, 1.75, 1, 30), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(found[1], samplers.dry(logits[1], prompts[0], 1.0, 1.75, 2, -1, [(4,)]), atol=2e-5)
    np.testing.assert_array_equal(found[2], logits[2])

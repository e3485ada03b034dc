"""The kernels of sample.cl and sample_threshold.cl, as `Sampler` launches them.

Thresholds: within THRESHOLD_TOLERANCE (relative) of the twin's. With top-p the twin is asked twice, with a mass a
little smaller and a little larger: the float32 sum may end the prefix one token to either side only where a token's
end lies that close to top_p. Tokens: the twin's score of the chosen one is within SCORE_TOLERANCE of the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from helpers import poisoned, read_guarded, run, with_poison

from llmcl import reference
from llmcl.kernels.common.step_state import RING, StepState
from llmcl.ops.sample import CONSTANTS, Sampler, SamplingParams
from llmcl.runtime.device import Device

THRESHOLD_TOLERANCE = 1e-6
MASS_TOLERANCE = 1e-5
SCORE_TOLERANCE = 2e-5

POSITION = 40  # of the latest token
# One work-group, less than a turn of its work-items; several groups, each with several turns. Each size is a program of
# its own, which PoCL takes ten seconds to compile: no test has a third.
SMALL, LARGE = 131, 32003

small = pytest.mark.oclgrind


class Bench:
    """A sampler with its logits and state in guarded buffers."""

    def __init__(
        self,
        device: Device,
        logits: np.ndarray,
        params: SamplingParams,
        seen: np.ndarray | None = None,
        counts: np.ndarray | None = None,
    ):
        self.device, self.logits, self.params = device, logits.astype(np.float32), params
        vocab = logits.size
        self.seen = np.full(vocab, -1, np.int32) if seen is None else seen.astype(np.int32)
        self.step = StepState(device, 1)
        for name, size in ("state", 3), ("tokens", 1), ("sampled", RING):
            setattr(self.step, name, poisoned(device, (size,)))
        self.sampler = Sampler(device, with_poison(device, self.logits), vocab, self.step)
        device.write(self.sampler.last_seen, self.seen)
        self.counts = np.zeros(vocab, np.int32) if counts is None else counts.astype(np.int32)
        device.write(self.sampler.counts, self.counts)
        self.sampler.configure(params)

    def sample(self, step: int, n_tokens: int = 1) -> int:
        """One sampled token; checks everything that the step leaves behind."""
        first = POSITION + 1 - n_tokens
        self.device.write(self.step.state, np.array([first, n_tokens, step], np.int32))
        ring_before = read_guarded(self.device, self.step.sampled, np.int32, (RING,))
        run(self.sampler.launches)
        ring = read_guarded(self.device, self.step.sampled, np.int32, (RING,))
        token = int(ring[step % RING])
        others = np.arange(RING) != step % RING
        np.testing.assert_array_equal(ring[others], ring_before[others])
        state = read_guarded(self.device, self.step.state, np.int32, (3,))
        np.testing.assert_array_equal(state, [POSITION + 1, 1, step + 1])
        fed = int(read_guarded(self.device, self.step.tokens, np.int32, (1,))[0])
        assert fed == min(token, self.logits.size - 1)
        if self.params.counts_tokens and token < self.logits.size:
            self.counts[token] += 1
        counts = self.device.read(self.sampler.counts, np.int32, (self.logits.size,))
        np.testing.assert_array_equal(counts, self.counts)
        return token

    def threshold(self) -> float:
        slot = CONSTANTS["SAMPLING_THRESHOLD"]
        return float(self.device.read(self.sampler.params, np.float32, (1,), 4 * slot)[0])

    def penalized(self) -> np.ndarray:
        """The logits after the penalties, rounded as on the device."""
        p = self.params
        wide = reference.penalize(self.logits, self.seen, POSITION, p.repeat_window, p.repeat_penalty)
        return reference.penalize_counts(wide, self.counts, p.presence_penalty, p.frequency_penalty).astype(np.float32)

    def check(self, step: int) -> None:
        """The threshold, its survivors and the token against the twin."""
        p, logits = self.params, self.penalized()
        token = self.sample(step)
        lowest = -np.inf
        if p.truncates:
            masses = (1.0, 1.0) if p.top_p == 1.0 else (p.top_p + MASS_TOLERANCE, max(p.top_p - MASS_TOLERANCE, 1e-30))
            lowest, highest = (float(reference.sample_threshold(logits, p.top_k, mass, p.min_p)) for mass in masses)
            room = THRESHOLD_TOLERANCE * float(np.max(np.abs(logits)))
            assert lowest - room <= self.threshold() <= highest + room
            survivors = int(np.sum(logits >= self.threshold()))
            assert np.sum(logits >= highest + room) <= survivors <= np.sum(logits >= lowest - room)
            lowest -= room
        scores = reference.sample_scores(logits, p.temperature, np.float32(lowest), p.seed or 0, step)
        certain = reference.sample_scores(logits, p.temperature, np.float32(self.threshold()), p.seed or 0, step)
        assert 0 <= token < logits.size
        assert scores[token] >= np.max(certain) - SCORE_TOLERANCE * max(1.0, abs(np.max(certain)))


def random_logits(vocab: int, seed: int = 0) -> np.ndarray:
    return (3.0 * np.random.default_rng(seed).standard_normal(vocab)).astype(np.float32)


def recent_tokens(vocab: int) -> np.ndarray:
    """Latest positions: half of the tokens never seen, the others on both sides of a window of 16."""
    rng = np.random.default_rng(vocab)
    return np.where(rng.random(vocab) < 0.5, rng.integers(0, POSITION + 1, vocab), -1)


def counted_tokens(vocab: int) -> np.ndarray:
    """Most tokens never, the others up to 9 times."""
    rng = np.random.default_rng(vocab + 1)
    return np.where(rng.random(vocab) < 0.8, 0, rng.integers(1, 10, vocab))


# All of them with seed 7 and temperature 0.8 unless they say otherwise.
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    # A penalty whose window has no token: the same by the kernels for scores. A CPU has another for the largest logit.
    "greedy_by_scores": {"temperature": 0.0, "repeat_penalty": 1.5, "repeat_window": 0},
    "temperature": {},
    "hot": {"temperature": 5.0},
    "top_k_1": {"top_k": 1},
    "top_k_40": {"top_k": 40},
    "top_k_all": {"top_k": 1 << 30},
    "top_p_0.9": {"top_p": 0.9},
    "top_p_tiny": {"top_p": 1e-6},
    "top_p_0.5": {"top_p": 0.5},
    "top_p_0_in_float32": {"top_p": 1e-50},
    "top_k_huge": {"top_k": 1 << 40, "repeat_window": 1 << 40},
    "cold": {"temperature": 1e-30},
    "heat_and_small_min_p": {"temperature": 1e30, "min_p": 1e-30},
    "min_p": {"min_p": 0.05},
    "min_p_1": {"min_p": 1.0},
    "all": {"top_k": 50, "top_p": 0.95, "min_p": 0.02, "repeat_penalty": 1.3, "repeat_window": 16},
    "k_of_p": {"top_k": 20, "top_p": 0.8},
    "penalty": {"repeat_penalty": 1.5, "repeat_window": 16},
    "most_penalty": {"temperature": 1e-30, "repeat_penalty": 1e-6, "repeat_window": 16},
    "greedy_penalty": {"temperature": 0.0, "repeat_penalty": 1.5, "repeat_window": 16},
    "reward": {"repeat_penalty": 0.7, "repeat_window": 16, "top_k": 5},
    "presence": {"temperature": 0.0, "presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 0.6},
    "both": {"presence_penalty": -0.5, "frequency_penalty": 0.25, "top_p": 0.9},
    "every_penalty": {
        "repeat_penalty": 1.3,
        "repeat_window": 16,
        "presence_penalty": 1.0,
        "frequency_penalty": -0.1,
        "top_k": 20,
    },
}


def parameters(name: str) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8, "seed": 7} | PARAMETERS[name])


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("vocab", [SMALL, LARGE])
def test_sample(target: Device, vocab: int, name: str) -> None:
    bench = Bench(target, random_logits(vocab), parameters(name), recent_tokens(vocab), counted_tokens(vocab))
    for step in range(4):
        bench.check(step)


@small
@pytest.mark.parametrize("name", ["greedy", "greedy_by_scores", "all"])
def test_few_logits(target: Device, name: str) -> None:
    Bench(target, random_logits(SMALL), parameters(name), recent_tokens(SMALL)).check(3)


@pytest.mark.parametrize("name", ["top_k_40", "all"])
def test_survivors_are_the_twins(target: Device, name: str) -> None:
    """On logits whose cumulative masses keep clear of top_p, the sets are equal, not merely close."""
    bench = Bench(target, random_logits(LARGE), parameters(name), recent_tokens(LARGE))
    bench.sample(0)
    logits, p = bench.penalized(), bench.params
    expected = logits >= reference.sample_threshold(logits, p.top_k, p.top_p, p.min_p)
    np.testing.assert_array_equal(logits >= bench.threshold(), expected)
    assert 1 < expected.sum() < LARGE


def test_equal_logits_survive_together_and_greedy_takes_the_lowest(target: Device) -> None:
    logits = np.zeros(LARGE, np.float32)
    logits[[500, 77, 30000]] = 2.0
    for name in ("greedy", "greedy_by_scores"):
        assert Bench(target, logits, parameters(name)).sample(0) == 77
    bench = Bench(target, logits, SamplingParams(temperature=1.0, top_k=2, seed=1))
    tokens = {bench.sample(step) for step in range(40)}
    assert bench.threshold() == 2.0
    assert tokens == {77, 500, 30000}


def draw(device: Device, seed: int, steps: Sequence[int]) -> list[int]:
    bench = Bench(device, random_logits(SMALL), SamplingParams(temperature=2.0, top_p=0.95, seed=seed))
    return [bench.sample(step) for step in steps]


def test_a_seed_gives_the_same_tokens_again(target: Device) -> None:
    steps = range(12)
    first = draw(target, 1234567890123, steps)
    assert draw(target, 1234567890123, steps) == first
    assert len(set(first)) > 4
    assert draw(target, 1234567890124, steps) != first  # the low word
    assert draw(target, 1234567890123 + (1 << 40), steps) != first  # the high word


def test_tokens_come_as_often_as_their_probability_says(target: Device) -> None:
    logits = np.full(SMALL, -np.inf, np.float32)
    likely = [3, 40, 80, 130]
    logits[likely] = np.log(np.array([0.5, 0.25, 0.15, 0.1]))
    bench = Bench(target, logits, SamplingParams(temperature=1.0, seed=3))
    draws = 400
    counts = np.bincount([bench.sample(step) for step in range(draws)], minlength=SMALL)[likely]
    expected = draws * np.exp(logits[likely].astype(np.float64))
    assert counts.sum() == draws
    assert np.sum((counts - expected) ** 2 / expected) < 16.3  # chi-square, 3 degrees of freedom, p = 0.001


@pytest.mark.parametrize("step", [0, RING - 1, RING, 3 * RING + 5])
def test_the_ring_and_the_state(target: Device, step: int) -> None:
    bench = Bench(target, random_logits(SMALL), parameters("greedy"))
    expected = int(np.argmax(bench.logits))
    assert bench.sample(step) == expected
    assert bench.sample(step, n_tokens=17) == expected  # after a prefill: the position moves by its length


@pytest.mark.parametrize("age", [0, 15, 16])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_window_of_the_penalty(target: Device, age: int, sign: float) -> None:
    """A token seen `age` positions before the latest is penalised within 16; the position is the step's last."""
    logits = np.full(SMALL, sign * 4.0, np.float32)
    logits[9] += 0.1
    seen = np.full(SMALL, -1)
    seen[9] = POSITION - age
    bench = Bench(target, logits, parameters("greedy_penalty"), seen)
    assert bench.sample(0, n_tokens=5) == (9 if age >= 16 else 0)


def test_a_place_in_the_cache_that_was_forgotten(target: Device) -> None:
    """Positions after the latest token belong to a conversation that was cut back: no penalty."""
    logits = np.arange(SMALL, dtype=np.float32)
    seen = np.full(SMALL, POSITION + 1)
    assert Bench(target, logits, parameters("greedy_penalty"), seen).sample(0) == 130


@pytest.mark.parametrize("name", ["greedy", "greedy_by_scores", "temperature", "top_k_40", "top_p_0.9", "min_p", "all"])
@pytest.mark.parametrize("vocab", [SMALL, LARGE])
def test_logits_that_are_no_numbers(target: Device, name: str, vocab: int) -> None:
    """The token is VOCAB, which the host reports; the next step's input stays inside the vocabulary."""
    assert Bench(target, np.full(vocab, np.nan), parameters(name), recent_tokens(vocab)).sample(0) == vocab


@pytest.mark.parametrize("name", ["greedy", "greedy_by_scores", "temperature", "top_k_40", "top_p_0.9", "min_p", "all"])
@pytest.mark.parametrize("infinite", ["all", "one", "all below"])
def test_a_token_is_never_chosen_for_an_infinite_logit(target: Device, name: str, infinite: str) -> None:
    logits = random_logits(SMALL)
    logits[5 if infinite == "one" else ...] = -np.inf if infinite == "all below" else np.inf
    bench = Bench(target, logits, parameters(name), recent_tokens(SMALL))
    assert bench.sample(0) == SMALL == reference.sample(bench.penalized(), bench.params.temperature, -np.inf, 7, 0)
    bench = Bench(target, random_logits(SMALL), parameters(name), recent_tokens(SMALL))
    bench.check(1)  # nothing is left that would matter to the next


@pytest.mark.parametrize("token", [0, 5, 63, 64, 127, 128, SMALL - 1])
@pytest.mark.parametrize("vocab", [SMALL, LARGE])
def test_the_largest_logit_wherever_it_is(target: Device, vocab: int, token: int) -> None:
    """With an equal one behind it, and a NaN in front."""
    logits = random_logits(vocab)
    logits[[token, vocab - 1]] = 100.0
    logits[(token - 1) % (vocab - 1)] = np.nan
    assert Bench(target, logits, parameters("greedy")).sample(0) == token


def test_rows_of_a_step_are_chosen_by_kernels_of_their_own(target: Device) -> None:
    """One by the largest logit, one by scores, one above a threshold: each as if it were alone."""
    names = ["greedy", "greedy_by_scores", "temperature", "top_k_40"]
    logits = np.stack([random_logits(SMALL, seed) for seed in range(len(names))])
    step = StepState(target, len(names), 0, len(names))
    sampler = Sampler(target, with_poison(target, logits), SMALL, step)
    for place, name in enumerate(names):
        sampler.configure(parameters(name), place)
        step.write_sequence(place, POSITION, 0)
    step.write_rows([*range(len(names))], 0)
    run(sampler.launches_for([*range(len(names))]), len(names))
    alone = [Bench(target, row, parameters(name)).sample(0) for row, name in zip(logits, names, strict=True)]
    assert step.read_rows(0, len(names))() == alone
    assert len(set(alone)) > 2


@pytest.mark.parametrize("name", ["greedy", "temperature"])
def test_one_nan_is_never_chosen(target: Device, name: str) -> None:
    logits = random_logits(SMALL)
    logits[5] = np.nan
    bench = Bench(target, logits, parameters(name))
    assert all(bench.sample(step) != 5 for step in range(8))


def test_infinite_logits_are_masked_out(target: Device) -> None:
    logits = np.full(LARGE, -np.inf, np.float32)
    logits[[3, 20000]] = 1.0
    for name in ("temperature", "top_k_40", "top_p_0.9", "min_p"):
        bench = Bench(target, logits, parameters(name))
        assert {bench.sample(step) for step in range(20)} == {3, 20000}


def test_sampling_leaves_the_latest_positions_alone(target: Device) -> None:
    bench = Bench(target, random_logits(SMALL), parameters("all"), recent_tokens(SMALL))
    bench.sample(0)
    np.testing.assert_array_equal(target.read(bench.sampler.last_seen, np.int32, (SMALL,)), bench.seen)


def test_remember_puts_the_latest_positions(target: Device) -> None:
    bench = Bench(target, random_logits(SMALL), parameters("greedy"))
    bench.sampler.remember([3, 5, 3, 130])
    latest = np.full(SMALL, -1)
    latest[[3, 5, 130]] = 2, 1, 3
    np.testing.assert_array_equal(target.read(bench.sampler.last_seen, np.int32, (SMALL,)), latest)
    bench.sampler.remember([])
    np.testing.assert_array_equal(target.read(bench.sampler.last_seen, np.int32, (SMALL,)), np.full(SMALL, -1))


@small
def test_a_penalty_counts_what_was_chosen(target: Device) -> None:
    """Greedily, with logits one apart: a penalty of 1.5 a time brings each in its turn."""
    logits = np.full(SMALL, -9.0, np.float32)
    logits[[7, 40, 3]] = 5.0, 4.0, 3.0
    bench = Bench(target, logits, SamplingParams(frequency_penalty=1.5, seed=0))
    assert [bench.sample(step) for step in range(6)] == [7, 40, 7, 3, 40, 7]


def test_count_puts_the_counts(target: Device) -> None:
    bench = Bench(target, random_logits(SMALL), parameters("presence"))
    bench.sampler.count([3, 5, 3, 130])
    expected = np.zeros(SMALL, np.int32)
    expected[[3, 5, 130]] = 2, 1, 1
    np.testing.assert_array_equal(target.read(bench.sampler.counts, np.int32, (SMALL,)), expected)
    bench.sampler.count([])
    assert not target.read(bench.sampler.counts, np.int32, (SMALL,)).any()


def test_each_sequence_has_its_own_counts(target: Device) -> None:
    step = StepState(target, 3, 0, 3)
    logits = np.tile(np.linspace(1.0, 2.0, SMALL, dtype=np.float32), (2, 1))
    sampler = Sampler(target, with_poison(target, logits), SMALL, step)
    params = {0: SamplingParams(seed=0), 1: SamplingParams(presence_penalty=2.0, seed=0), 2: SamplingParams(seed=0)}
    for place, own in params.items():
        sampler.configure(own, place)
        sampler.count([SMALL - 1] * (place == 1), place)
        step.write_sequence(place, 4, 0)
    found = []
    for number in range(2):
        step.write_rows([1, 2], number)
        run(sampler.launches_for([1, 2]), 2)
        found.append(step.read_rows(number, 2)())
    assert found == [[SMALL - 2, SMALL - 1], [SMALL - 3, SMALL - 1]]
    counts = target.read(sampler.counts, np.int32, (3, SMALL))
    assert counts[1, -3:].tolist() == [1, 1, 1] and counts.sum() == 3

"""The samplers of survivors.cl, as `Sampler` launches them: survivors, temperature and token against the twins.

The expected survivors of four tokens are those of llama.cpp's tests/test-sampling.cpp. Thresholds are within TOLERANCE
(relative) of the twin's. With a mass as the limit, the float32 sum may end one token to either side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import poisoned, run, with_poison

from llmcl.kernels.common.step_state import RING, StepState
from llmcl.ops.sample import CONSTANTS, FILTERED, Sampler, SamplingParams
from llmcl.reference import penalize_counts, sample_scores, samplers
from llmcl.reference.arrays import Array, Bool
from llmcl.runtime.device import Device

TOLERANCE = 1e-6
SCORE_TOLERANCE = 5e-5
POSITION = 40
SMALL, LARGE = 131, 32003
small = pytest.mark.oclgrind


class Bench:
    """A sampler for one sequence."""

    def __init__(self, device: Device, logits: Array, params: SamplingParams):
        self.device, self.logits, self.params = device, logits.astype(np.float32), params
        self.step = StepState(device, 1)
        for name, size in ("state", 3), ("tokens", 1), ("sampled", RING):
            setattr(self.step, name, poisoned(device, (size,)))
        self.sampler = Sampler(device, with_poison(device, self.logits), logits.size, self.step)
        self.sampler.configure(params)
        assert self.sampler.choice(params) == FILTERED

    def sample(self, step: int) -> int:
        self.device.write(self.step.state, np.array([POSITION, 1, step], np.int32))
        run(self.sampler.launches)
        return int(self.device.read(self.step.sampled, np.int32, (1,), 4 * (step % RING))[0])

    def slot(self, name: str) -> float:
        return float(self.device.read(self.sampler.params, np.float32, (1,), 4 * CONSTANTS[f"SAMPLING_{name}"])[0])

    def survivors(self) -> Bool:
        low, high = self.slot("THRESHOLD"), self.slot("CEILING")
        return np.asarray((self.logits > -np.inf) & (self.logits >= low) & (self.logits <= high))


def kept_by_twins(logits: Array, p: SamplingParams, step: int, mass: float = 0.0) -> Bool:
    """The survivors. mass: what the device's sums may be off by."""
    kept = np.asarray(logits > -np.inf)
    if p.mirostat:
        return samplers.mirostat(logits, kept, p.temperature, 2 * p.mirostat_tau)
    kept = samplers.top_n_sigma(logits, kept, p.top_n_sigma)
    kept = samplers.truncated(logits, kept, top_k=p.top_k)
    kept = samplers.typical_p(logits, kept, p.typical_p + mass * (p.typical_p < 1))
    kept = samplers.truncated(logits, kept, top_p=p.top_p + mass * (p.top_p < 1))
    kept = samplers.truncated(logits, kept, min_p=p.min_p)
    if samplers.xtc_applies(p.xtc_probability, p.seed or 0, step):
        kept = samplers.xtc(logits, kept, p.xtc_threshold)
    return kept


def random_logits(vocab: int, seed: int = 0) -> Array:
    return (3.0 * np.random.default_rng(seed).standard_normal(vocab)).astype(np.float32)


# All with seed 7 and temperature 0.8 unless they say otherwise.
PARAMETERS: dict[str, dict[str, Any]] = {
    "top_n_sigma": {"top_n_sigma": 1.0},
    "top_n_sigma_k": {"top_n_sigma": 2.0, "top_k": 30},
    "typical": {"typical_p": 0.5},
    "typical_tiny": {"typical_p": 1e-6},
    "typical_of_k": {"typical_p": 0.9, "top_k": 60},
    "typical_then_p_then_min_p": {"typical_p": 0.8, "top_p": 0.7, "min_p": 0.2},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    "xtc_of_p": {"xtc_probability": 0.5, "xtc_threshold": 0.05, "top_p": 0.9},
    "xtc_off_above_half": {"xtc_probability": 1.0, "xtc_threshold": 0.51},
    "dynatemp": {"dynatemp_range": 0.5},
    "dynatemp_below_0": {"dynatemp_range": 2.0, "dynatemp_exponent": 3.0, "min_p": 0.05},
    "everything": {
        "top_n_sigma": 3.0,
        "top_k": 80,
        "typical_p": 0.95,
        "top_p": 0.9,
        "min_p": 0.01,
        "xtc_probability": 0.7,
        "xtc_threshold": 0.02,
        "dynatemp_range": 0.3,
    },
    "mirostat": {"mirostat": 2, "mirostat_tau": 1.5},
    "mirostat_hot": {"mirostat": 2, "mirostat_tau": 3.0, "temperature": 1.7, "top_k": 2, "typical_p": 0.1},
}


def parameters(name: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8, "seed": 7} | PARAMETERS[name] | more)


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("vocab", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)])  # 3 s to compile
def test_survivors_temperature_and_token(target: Device, vocab: int, name: str) -> None:
    bench = Bench(target, random_logits(vocab, 3), parameters(name))
    logits, p = bench.logits, bench.params
    for step in range(3):
        if p.mirostat:
            bench.sampler.configure(p)  # mu as at the beginning
        token = bench.sample(step)
        kept, kept_more = (kept_by_twins(logits, p, step, mass) for mass in (0.0, 1e-5))
        survivors = bench.survivors()
        np.testing.assert_array_equal(survivors, kept_more if np.sum(survivors) > np.sum(kept) else kept)
        temperature = p.temperature
        if not p.mirostat:
            temperature = samplers.dynamic_temperature(
                logits, survivors, p.temperature, p.dynatemp_range, p.dynatemp_exponent
            )
        assert bench.slot("HEAT") == pytest.approx(temperature, rel=1e-4)
        masked = np.where(survivors, logits, -np.inf)
        scores = sample_scores(masked, bench.slot("HEAT"), np.float32(-np.inf), p.seed or 0, step)
        assert scores[token] >= np.max(scores) - SCORE_TOLERANCE * max(1.0, abs(np.max(scores)))


@small
@pytest.mark.parametrize("name", ["everything", "mirostat"])
def test_few_logits(target: Device, name: str) -> None:
    assert 0 <= Bench(target, random_logits(SMALL, 3), parameters(name)).sample(1) < SMALL


@pytest.mark.parametrize(
    ("shares", "options", "left"),
    [
        ([0.1, 0.2, 0.3, 0.4], {"top_n_sigma": 1.0}, [2, 3]),
        ([0.1, 0.2, 0.3, 0.4], {"top_n_sigma": 3.0}, [0, 1, 2, 3]),
        ([0.97, 0.01, 0.01, 0.01], {"typical_p": 0.5}, [0]),
        ([0.4, 0.2, 0.2, 0.2], {"typical_p": 0.5}, [1, 2, 3]),
        ([0.4, 0.3, 0.2, 0.1], {"xtc_probability": 1.0, "xtc_threshold": 0.09}, [3]),
        ([0.4, 0.3, 0.2, 0.1], {"xtc_probability": 1.0, "xtc_threshold": 0.19}, [2, 3]),
        ([0.4, 0.3, 0.2, 0.1], {"xtc_probability": 1.0, "xtc_threshold": 0.29}, [1, 2, 3]),
        ([0.4, 0.3, 0.2, 0.1], {"xtc_probability": 1.0, "xtc_threshold": 0.39}, [0, 1, 2, 3]),
    ],
)
def test_llama_cpps_values(target: Device, shares: list[float], options: dict[str, float], left: list[int]) -> None:
    places = [3, 40, 80, 130]
    logits = np.full(SMALL, -np.inf, np.float32)
    logits[places] = np.log(np.array(shares))
    bench = Bench(target, logits, SamplingParams(temperature=1.0, seed=3, **options))  # type: ignore[arg-type]
    bench.sample(0)
    assert np.flatnonzero(bench.survivors()).tolist() == [places[i] for i in left]
    twins = kept_by_twins(logits, bench.params, 0)
    assert np.flatnonzero(twins).tolist() == [places[i] for i in left]


def test_mirostat_follows_the_surprise(target: Device) -> None:
    """Over an answer, mu is the twin's, and the mean surprise comes close to tau."""
    p = parameters("mirostat", temperature=1.3, mirostat_eta=0.3)
    bench = Bench(target, random_logits(SMALL, 5), p)
    mu, surprises = 2 * p.mirostat_tau, []
    for step in range(150):
        token = bench.sample(step)
        kept = samplers.mirostat(bench.logits, np.ones(SMALL, bool), p.temperature, mu)
        assert kept[token]
        surprises.append(-samplers.log_shares(bench.logits / p.temperature, kept)[token] / np.log(2))
        mu = samplers.mirostat_mu(bench.logits, kept, p.temperature, token, mu, p.mirostat_tau, p.mirostat_eta)
        assert bench.sampler.read_mu() == pytest.approx(mu, rel=1e-4, abs=1e-4)
    assert np.mean(surprises[50:]) == pytest.approx(p.mirostat_tau, abs=0.15)
    bench.sampler.configure(p, mu=1.25)
    assert bench.sampler.read_mu() == 1.25


def shares_of(logits: Array, kept: Array, temperature: float) -> Array:
    return np.asarray(np.exp(samplers.log_shares(logits / temperature, kept)))


@pytest.mark.parametrize("name", ["typical", "xtc_of_p", "dynatemp", "mirostat"])
def test_tokens_come_as_often_as_their_probability_says(target: Device, name: str) -> None:
    """XTC: a mixture of the shares with and without it."""
    logits = np.full(SMALL, -np.inf, np.float32)
    logits[[3, 40, 80, 130, 7]] = np.log(np.array([0.4, 0.25, 0.2, 0.1, 0.05]))
    p = parameters(name, **{"mirostat_eta": 0.0} if name == "mirostat" else {})
    bench = Bench(target, logits, p)
    draws = 1500 if target.entry.kind == "cpu" else 400  # a software renderer takes 12 ms for one
    counts = np.bincount([bench.sample(step) for step in range(draws)], minlength=SMALL)
    kept = [kept_by_twins(logits, p, step) for step in range(draws)]
    heat = samplers.dynamic_temperature(logits, kept[0], p.temperature, p.dynatemp_range, p.dynatemp_exponent)
    expected = np.sum([shares_of(logits, each, heat) for each in kept], axis=0)
    likely = expected > 0
    assert counts[likely].sum() == draws and 1 < likely.sum() <= 5
    if name == "xtc_of_p":
        assert abs(np.mean([each[3] for each in kept]) - 0.5) < 0.05  # it applies to half of the tokens
    chi_square = np.sum((counts - expected)[likely] ** 2 / expected[likely])
    assert chi_square < {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5}[int(likely.sum()) - 1]  # p = 0.001


def test_rows_of_a_step_have_their_own_samplers(target: Device) -> None:
    params = [*(parameters(name) for name in ("xtc", "mirostat", "typical")), SamplingParams(seed=7)]
    params.append(SamplingParams(temperature=0.8, top_k=5, seed=7))
    logits = np.stack([random_logits(SMALL, seed) for seed in range(len(params))])
    step = StepState(target, len(params), 0, len(params))
    sampler = Sampler(target, with_poison(target, logits), SMALL, step)
    for place, each in enumerate(params):
        sampler.configure(each, place)
        step.write_sequence(place, POSITION, 0)
    step.write_rows([*range(len(params))], 0)
    run(sampler.launches_for([*range(len(params))]), len(params))
    together = step.read_rows(0, len(params))()
    assert together[:3] == [Bench(target, row, each).sample(0) for row, each in zip(logits[:3], params, strict=False)]
    assert together[3] == np.argmax(logits[3]) and logits[4][together[4]] >= np.sort(logits[4])[-5]
    assert sampler.read_mu(1) != 2 * params[1].mirostat_tau and sampler.read_mu(0) == 2 * params[0].mirostat_tau


@pytest.mark.parametrize("name", ["everything", "typical", "xtc", "mirostat"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers(target: Device, name: str, value: float) -> None:
    """The token is VOCAB, which the host reports, and the next step is as if nothing had been."""
    bench = Bench(target, np.full(SMALL, value), parameters(name))
    assert bench.sample(0) == SMALL
    assert not bench.params.mirostat or bench.sampler.read_mu() == 2 * bench.params.mirostat_tau


def test_penalties_come_first(target: Device) -> None:
    p = SamplingParams(temperature=0.5, seed=3, presence_penalty=9.0, typical_p=0.6)
    bench = Bench(target, random_logits(SMALL), p)
    bench.sampler.count([4, 9, 9])
    counts = np.bincount([4, 9, 9], minlength=SMALL)
    logits = penalize_counts(bench.logits, counts, 9.0, 0.0).astype(np.float32)
    kept = kept_by_twins(logits, p, 0)
    assert kept[bench.sample(0)]
    assert bench.slot("CEILING") == np.max(logits[kept]) and bench.slot("THRESHOLD") == np.min(logits[kept])

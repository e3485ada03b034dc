"""logit_bias.cl and logprobs.cl against their twins, alone and with several sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import poisoned, read_guarded, run, with_poison

from llmcl import reference
from llmcl.errors import UsageError
from llmcl.kernels.common.step_state import StepState
from llmcl.ops.logprobs import MAX_TOP
from llmcl.ops.sample import MAX_BIASES, Sampler, SamplingParams
from llmcl.runtime.device import Device

ABSOLUTE = 3e-5
SMALL = 131


def random_logits(rows: int, vocab: int) -> np.ndarray:
    logits = (3.0 * np.random.default_rng(vocab).standard_normal((rows, vocab))).astype(np.float32)
    logits[:, 7] = logits[:, 3]  # a tie
    return logits


def bits(allowed: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-allowed.size // 32) * 32, bool)
    padded[: allowed.size] = allowed
    return np.packbits(padded, bitorder="little").view(np.uint32)


def check(found: Any, logits: np.ndarray, token: int, k: int) -> None:
    log_p, top = reference.logprobs(logits, k)
    assert found.token == token and found.logprob == pytest.approx(log_p[token], abs=ABSOLUTE)
    assert [i for i, _ in found.top] == top
    np.testing.assert_allclose([p for _, p in found.top], log_p[top], atol=ABSOLUTE)


@pytest.mark.parametrize(
    ("vocab", "k"),
    [
        *((SMALL, k) for k in (0, 1, MAX_TOP)),
        *(pytest.param(4099, k, marks=pytest.mark.oclgrind) for k in (0, 1)),  # MAX_TOP takes the simulator 17 s
        (4099, MAX_TOP),
        *((32003, k) for k in (0, 1, MAX_TOP)),
    ],
)
def test_logprobs_of_one_sequence(device: Device, vocab: int, k: int) -> None:
    logits, step = random_logits(1, vocab)[0], StepState(device, 1)
    sampler = Sampler(device, with_poison(device, logits), vocab, step)
    for number, params in enumerate((SamplingParams(logprobs=k), SamplingParams(1.5, seed=7, logprobs=k))):
        sampler.configure(params)
        device.write(step.state, np.array([4, 1, number], np.int32))
        run(sampler.launches)
        (token,) = step.read_sampled(number)()
        (found,) = sampler.logprobs.read(number, [0])()
        check(found, logits, token, k)


def test_logits_that_are_infinite_or_no_numbers(device: Device) -> None:
    logits, step = random_logits(1, SMALL)[0], StepState(device, 1)
    logits[10:] = -np.inf
    logits[2] = np.nan
    sampler = Sampler(device, with_poison(device, logits), SMALL, step)
    sampler.configure(SamplingParams(logprobs=MAX_TOP))
    device.write(step.state, np.array([4, 1, 0], np.int32))
    run(sampler.launches)
    (found,) = sampler.logprobs.read(0, [0])()
    numbers = np.where(np.isnan(logits), -np.inf, logits)
    log_p, order = reference.logprobs(numbers, 9)
    assert [token for token, _ in found.top][:9] == order
    np.testing.assert_allclose([p for _, p in found.top][:9], log_p[order], atol=ABSOLUTE)


@pytest.mark.parametrize("vocab", [pytest.param(SMALL, marks=pytest.mark.oclgrind), 32003])
def test_each_sequence_has_its_own(device: Device, vocab: int) -> None:
    rows = 3
    logits, step = random_logits(rows, vocab), StepState(device, 4, 0, 4)
    buffer = with_poison(device, logits)
    sampler = Sampler(device, buffer, vocab, step)
    places = [2, 0, 3]
    allowed = np.random.default_rng(1).random(vocab) < 0.2
    allowed[int(np.argmax(logits[2]))] = False
    best = int(np.argmax(logits[1]))
    params = {
        2: SamplingParams(logprobs=3),
        0: SamplingParams(logit_bias={best: -100.0, 5: 50.0, vocab - 1: 30.0}, logprobs=2, seed=1),
        3: SamplingParams(temperature=0.7, top_k=5, seed=3),
        1: SamplingParams(),
    }
    for place, own in params.items():
        sampler.configure(own, place)
        step.write_sequence(place, 4, 0)
    sampler.bias.allow({3: bits(allowed)})
    step.write_rows(places, 9)
    run(sampler.launches_for(places), rows)
    tokens = step.read_rows(9, rows)()
    found = sampler.logprobs.read(9, places)()
    changed = [
        logits[0],
        reference.logit_bias(logits[1], params[0].logit_bias),
        reference.logit_bias(logits[2], {}, allowed),
    ]
    np.testing.assert_allclose(
        read_guarded(device, buffer, np.float32, (rows, vocab)), np.array(changed), rtol=1e-6, atol=1e-5
    )
    assert tokens[0] == int(np.argmax(logits[0])) and tokens[1] == 5
    assert allowed[tokens[2]] and changed[2][tokens[2]] >= np.sort(changed[2])[-5]
    check(found[0], logits[0], tokens[0], 3)
    check(found[1], logits[1], tokens[1], 2)  # as the model has it, without the bias
    assert found[2] is None


def test_a_mask_that_is_lifted(device: Device) -> None:
    logits, step = random_logits(1, SMALL)[0], StepState(device, 1)
    order = np.argsort(-logits)
    allowed = np.ones(SMALL, bool)
    allowed[order[:3]] = False
    buffer = poisoned(device, (SMALL,))
    sampler = Sampler(device, buffer, SMALL, step)
    sampler.configure(SamplingParams())
    for number, (mask, expected) in enumerate(((bits(allowed), order[3]), (None, order[0]))):
        device.write(buffer, logits)
        sampler.bias.allow({0: mask})
        device.write(step.state, np.array([4, 1, number], np.int32))
        run(sampler.launches)
        assert step.read_sampled(number)() == [expected]
    with pytest.raises(ValueError, match=r"expected uint32 \(5,\)"):
        sampler.bias.allow({0: np.zeros(4, np.uint32)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logprobs": 21}, "logprobs is 21; expected 0 to 20"),
        ({"logit_bias": [1, 2]}, "expected a mapping"),
        ({"logit_bias": {-1: 1.0}}, "bias for -1; expected token ids"),
        ({"logit_bias": {3: float("nan")}}, "token 3 is nan; expected -10000 to 10000"),
        ({"logit_bias": {"a": 1.0}}, "bias for .a.; expected token ids"),
        ({"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1.0)}, f"at most {MAX_BIASES} token ids"),
    ],
)
def test_bad_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**options)


def test_a_bias_beyond_the_vocabulary(default_device: Device) -> None:
    sampler = Sampler(default_device, poisoned(default_device, (SMALL,)), SMALL, StepState(default_device, 1))
    with pytest.raises(UsageError, match="token 131; expected 0 to 130"):
        sampler.configure(SamplingParams(logit_bias={SMALL: 1.0}))

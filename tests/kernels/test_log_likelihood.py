"""log_likelihood and kl_divergence: largest absolute difference, in nats."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import poisoned, read_guarded, with_poison
from parameters import each_value

from llmcl import reference
from llmcl.ops.log_likelihood import kl_divergence, log_likelihood
from llmcl.runtime.device import Device

TOLERANCE = 1e-5

VOCABULARIES = [1, 7, 8, 131, pytest.param(577, marks=pytest.mark.oclgrind), 49152]


def random_logits(rng: np.random.Generator, n: int, vocab: int) -> np.ndarray:
    """Some rows flat, some with nearly all the mass on a token, all far from zero."""
    spread = rng.uniform(0.1, 12.0, (n, 1))
    return (spread * rng.standard_normal((n, vocab)) + rng.uniform(-60, 60, (n, 1))).astype(np.float32)


def computed_kl(device: Device, other: np.ndarray, logits: np.ndarray) -> np.ndarray:
    n, vocab = logits.shape
    out = poisoned(device, (n, 2))
    kl_divergence(device, vocab, with_poison(device, other), with_poison(device, logits), out).enqueue(n)
    return read_guarded(device, out, np.float32, (n, 2))


@each_value(("n", [1, 9]), ("vocab", VOCABULARIES))
def test_log_likelihood(target: Device, n: int, vocab: int) -> None:
    rng = np.random.default_rng(n * vocab)
    logits = random_logits(rng, n, vocab)
    targets = rng.integers(0, vocab, n).astype(np.int32)
    targets[-1] = vocab - 1
    out = poisoned(target, (n,))
    log_likelihood(target, vocab, with_poison(target, logits), with_poison(target, targets), out).enqueue(n)
    actual = read_guarded(target, out, np.float32, (n,))
    expected = reference.log_likelihood(logits, targets)
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=1e-6)


def check_kl(device: Device, vocab: int, tolerance: float = TOLERANCE) -> None:
    rng = np.random.default_rng(vocab)
    other = random_logits(rng, 6, vocab)
    logits = (other + rng.uniform(0, 2, (6, 1)) * rng.standard_normal((6, vocab))).astype(np.float32)
    actual = computed_kl(device, other, logits)
    np.testing.assert_allclose(actual, reference.kl_divergence(other, logits), atol=tolerance, rtol=1e-6)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_kl_divergence(target: Device, vocab: int) -> None:
    check_kl(target, vocab)


def test_a_vocabulary_of_today(device: Device) -> None:
    """In the work-groups that the device gets: llvmpipe ends a work-item's loops after 65535 iterations in all."""
    check_kl(device, 128256, tolerance=3e-5)


def test_equal_logits_and_ties(target: Device) -> None:
    """A distribution has no divergence from itself; of equal maxima the first counts, as in NumPy."""
    logits = np.zeros((3, 131), np.float32)
    logits[1, [5, 90]] = 2.0
    logits[2, 130] = 1.0
    same = computed_kl(target, logits, logits)
    assert np.all(same[:, 1] == 1.0) and np.all(np.abs(same[:, 0]) < 1e-6)
    other = logits.copy()
    other[1, 90] += 1e-6
    other[2, 0] = 1.0
    assert computed_kl(target, logits, other)[:, 1].tolist() == [1.0, 0.0, 0.0]

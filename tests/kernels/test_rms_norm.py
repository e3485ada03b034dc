"""rms_norm: largest difference over the largest expected magnitude."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import poisoned, read_guarded, relative_error, run, with_poison

from llmcl import reference
from llmcl.ops.rms_norm import rms_norm
from llmcl.runtime.device import Device

TOLERANCE = 1e-6


def normed(device: Device, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    out = poisoned(device, x.shape)
    run(rms_norm(device, with_poison(device, x), device.upload(weight, "norm"), out, eps), x.shape[0])
    return read_guarded(device, out, np.float32, x.shape)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 577])
@pytest.mark.parametrize("hidden", [16, pytest.param(80, marks=pytest.mark.oclgrind), 1024, 1040])
def test_rms_norm(target: Device, n: int, hidden: int) -> None:
    rng = np.random.default_rng(n * hidden)
    x = (3.0 * rng.standard_normal((n, hidden))).astype(np.float32)
    weight = rng.standard_normal(hidden).astype(np.float32)
    assert relative_error(normed(target, x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) < TOLERANCE


def test_eps_counts_where_x_is_small(target: Device) -> None:
    x = np.full((3, 64), 1e-3, np.float32)
    weight = np.ones(64, np.float32)
    actual = normed(target, x, weight, 1e-5)
    assert relative_error(actual, reference.rms_norm(x, weight, 1e-5)) < TOLERANCE
    assert np.all(normed(target, np.zeros_like(x), weight, 1e-5) == 0.0)


def test_squares_that_overflow_give_no_zeros(target: Device) -> None:
    """The twin has the right result, in float64; float32 cannot tell it from others, and says so."""
    x = np.ones((3, 64), np.float32)
    x[1, 40] = 1e20
    actual = normed(target, x, np.ones(64, np.float32), 1e-5)
    assert np.isnan(actual[1]).all() and np.isfinite(actual[[0, 2]]).all()


def test_a_part_of_each_row_in_place(target: Device) -> None:
    rng = np.random.default_rng(5)
    x, weight = rng.standard_normal((17, 112)).astype(np.float32), rng.standard_normal(48).astype(np.float32)
    buffer = with_poison(target, x)
    run(rms_norm(target, buffer, target.upload(weight, "norm"), buffer, 1e-5, row=112, first=32), 17)
    expected = x.copy()
    expected[:, 32:80] = reference.rms_norm(x[:, 32:80], weight, 1e-5)
    assert relative_error(read_guarded(target, buffer, np.float32, x.shape), expected) < TOLERANCE


def test_added_to_what_is_there(target: Device) -> None:
    rng = np.random.default_rng(4)
    x, before = (rng.standard_normal((17, 144)).astype(np.float32) for _ in range(2))
    weight = rng.standard_normal(144).astype(np.float32)
    out = with_poison(target, before)
    run(rms_norm(target, with_poison(target, x), target.upload(weight, "norm"), out, 1e-5, add=True), 17)
    expected = before + reference.rms_norm(x, weight, 1e-5)
    assert relative_error(read_guarded(target, out, np.float32, x.shape), expected) < TOLERANCE

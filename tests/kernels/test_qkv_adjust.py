"""qkv_adjust: largest difference over the largest expected magnitude."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import read_guarded, relative_error, rotations, run, with_poison

from llmcl import reference
from llmcl.ops.qkv_adjust import qkv_adjust
from llmcl.runtime.device import Device

TOLERANCE = 1e-6
EPS = 1e-5


@pytest.mark.parametrize("n", [1, 17])
@pytest.mark.parametrize(
    ("n_q_heads", "n_kv_heads", "head_dim"),
    [(1, 1, 16), (6, 2, 80), pytest.param(8, 1, 128, marks=pytest.mark.oclgrind)],
)
@pytest.mark.parametrize(
    ("has_bias", "has_norms", "value_norms", "rotates"),
    [
        (True, False, False, False),
        (False, True, False, False),
        (True, True, False, False),
        (False, True, True, False),
        (False, True, False, True),
        (True, True, False, True),
    ],
)
def test_qkv_adjust(
    target: Device,
    has_bias: bool,
    has_norms: bool,
    value_norms: bool,
    rotates: bool,
    n_q_heads: int,
    n_kv_heads: int,
    head_dim: int,
    n: int,
) -> None:
    rng = np.random.default_rng(n * head_dim)
    shape = (n, n_q_heads + 2 * n_kv_heads, head_dim)
    qkv = (3.0 * rng.standard_normal(shape)).astype(np.float32)
    qkv[:, 0] *= 1e-3  # eps counts
    bias = rng.standard_normal(shape[1:]).astype(np.float32) if has_bias else None
    norms = rng.standard_normal((2, head_dim)).astype(np.float32) if has_norms else None
    rope = rotations(head_dim, np.arange(5, 5 + n)) if rotates else None
    buffer = with_poison(target, qkv)
    launches = qkv_adjust(
        target,
        buffer,
        None if bias is None else with_poison(target, bias),
        None if norms is None else with_poison(target, norms),
        n_q_heads=n_q_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        eps=EPS,
        value_norms=value_norms,
        rope=None if rope is None else with_poison(target, rope),
    )
    run(launches, n)
    turns = None if rope is None else (rope[:, : head_dim // 2], rope[:, head_dim // 2 :])
    expected = reference.qkv_adjust(
        qkv, bias, norms, n_q_heads, n_kv_heads, EPS, value_norms=value_norms, rotation=turns
    )
    assert relative_error(read_guarded(target, buffer, np.float32, shape), expected) < TOLERANCE


def test_squares_that_overflow_give_no_zeros(target: Device) -> None:
    qkv = np.ones((1, 3, 16), np.float32)
    qkv[0, 1, 3] = 1e20
    buffer, norms = with_poison(target, qkv), with_poison(target, np.ones((2, 16), np.float32))
    run(qkv_adjust(target, buffer, None, norms, n_q_heads=1, n_kv_heads=1, head_dim=16, eps=EPS), 1)
    actual = read_guarded(target, buffer, np.float32, qkv.shape)[0]
    assert np.isfinite(actual[0]).all() and np.isnan(actual[1]).all() and (actual[2] == 1.0).all()


def test_nothing_is_launched_for_nothing(target: Device) -> None:
    buffer = with_poison(target, np.zeros((1, 3, 16), np.float32))
    assert qkv_adjust(target, buffer, None, None, n_q_heads=1, n_kv_heads=1, head_dim=16, eps=EPS) == []

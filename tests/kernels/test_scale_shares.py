"""scale_shares and zero_rows: a product in float32, and nothing; both exact."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import poisoned, read_guarded, run, with_poison

from llmcl import reference
from llmcl.ops.scale_shares import scale_shares
from llmcl.ops.zero_rows import zero_rows
from llmcl.runtime.device import Device


@pytest.mark.parametrize(("n", "n_experts", "top_k"), [(1, 128, 8), pytest.param(17, 5, 3, marks=pytest.mark.oclgrind)])
def test_scale_shares(target: Device, n: int, n_experts: int, top_k: int) -> None:
    rng = np.random.default_rng(n_experts)
    shares = rng.random((n, top_k)).astype(np.float32)
    ids = rng.integers(0, n_experts, (n, top_k)).astype(np.int32)
    scales = rng.standard_normal(n_experts).astype(np.float32)
    buffer = with_poison(target, shares)
    run(scale_shares(target, buffer, with_poison(target, ids), with_poison(target, scales), top_k=top_k), n)
    expected = reference.scale_shares(shares, ids, scales).astype(np.float32)
    np.testing.assert_array_equal(read_guarded(target, buffer, np.float32, shares.shape), expected)


@pytest.mark.parametrize("n", [1, 17])
@pytest.mark.parametrize("columns", [16, pytest.param(80, marks=pytest.mark.oclgrind), 1040])
def test_zero_rows(target: Device, columns: int, n: int) -> None:
    buffer = poisoned(target, (n, columns))
    run(zero_rows(target, buffer, columns), n)
    assert not read_guarded(target, buffer, np.float32, (n, columns)).any()

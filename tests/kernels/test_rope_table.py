"""rope_table: a float32 angle and the device's cos and sin; absolute difference."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import poisoned, read_guarded, run, small_config, step_state_at

from llmcl import reference
from llmcl.ops.rope_table import rope_table
from llmcl.runtime.device import Device


@pytest.mark.parametrize(("n", "position"), [(1, 577), pytest.param(17, 3, marks=pytest.mark.oclgrind), (9, 100_000)])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_rope_table(target: Device, head_dim: int, n: int, position: int) -> None:
    rotation = small_config(head_dim=head_dim).rotations()["main"]
    rotation[1, ::3] = 1.25
    rope = poisoned(target, (n, head_dim))
    step = step_state_at(target, position=position, n_tokens=n)
    run(rope_table(target, step, target.upload(rotation, "rotation"), rope), n)
    expected = np.concatenate(reference.rope_table(position + np.arange(n), *rotation), axis=1)
    np.testing.assert_allclose(read_guarded(target, rope, np.float32, (n, head_dim)), expected, rtol=0, atol=1.3e-6)

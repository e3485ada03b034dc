"""rope_axes: a float32 angle and the device's cos and sin; absolute difference."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import poisoned, read_guarded, run, small_config

from llmcl import reference
from llmcl.architectures.config.rope_axes import axes_of
from llmcl.ops.rope_axes import rope_axes
from llmcl.runtime.device import Device


@pytest.mark.parametrize(
    ("layout", "sections", "head_dim"), [("chunks", (2, 3, 3), 16), ("interleaved", (16, 13, 11), 80)]
)
@pytest.mark.parametrize("n", [1, pytest.param(17, marks=pytest.mark.oclgrind)])
def test_rope_axes(target: Device, n: int, layout: str, sections: tuple[int, ...], head_dim: int) -> None:
    rotation = small_config(head_dim=head_dim).rotations()["main"]
    rotation[1, ::3] = 1.25
    positions = np.random.default_rng(n).integers(0, 100_000, (n, 3)).astype(np.int32)
    axes = np.array(axes_of(sections, layout, head_dim // 2), np.int32)
    rope = poisoned(target, (n, head_dim))
    inputs = (target.upload(values, "input") for values in (positions, axes, rotation))
    run(rope_axes(target, *inputs, rope, n_axes=3), n)
    expected = np.concatenate(reference.rope_axes(positions, axes, *rotation), axis=1)
    np.testing.assert_allclose(read_guarded(target, rope, np.float32, (n, head_dim)), expected, rtol=0, atol=1.3e-6)


def test_equal_positions_rotate_like_one_axis() -> None:
    rotation, axes = small_config(head_dim=16).rotations()["main"], np.array([0, 1, 2, 0, 1, 2, 0, 0])
    positions = np.arange(3, 12)
    expected = reference.rope_table(positions, *rotation)
    actual = reference.rope_axes(np.repeat(positions[:, None], 3, axis=1), axes, *rotation)
    np.testing.assert_array_equal(actual, expected)

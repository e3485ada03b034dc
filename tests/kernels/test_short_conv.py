"""short_conv and conv_state: largest difference over the largest expected magnitude."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import read_guarded, relative_error, run, with_poison

from llmcl import reference
from llmcl.kernels.common.step_state import StepState
from llmcl.ops.short_conv import short_conv
from llmcl.runtime.device import Device

TOLERANCE = 1e-6
SLOTS = 4


@pytest.mark.parametrize("position", [0, 1, 9])
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.oclgrind), 17])
@pytest.mark.parametrize(("channels", "length"), [(16, 2), (80, 3), (2064, 4)])
def test_tokens_of_a_sequence(target: Device, channels: int, length: int, n: int, position: int) -> None:
    rng = np.random.default_rng(n * channels + position)
    rows = rng.standard_normal((n, 3, channels)).astype(np.float32)
    weights = rng.standard_normal((length, channels)).astype(np.float32)
    states = rng.standard_normal((SLOTS, length - 1, channels)).astype(np.float32)
    if position == 0:
        states[2] = np.nan  # of a text that another one has left
    step = StepState(target, n)
    target.write(step.state, np.array([position, n], np.int32))
    step.write_recurrent_slot(2)
    of_states, out = with_poison(target, states), with_poison(target, np.zeros((n, channels), np.float32))
    buffers = with_poison(target, rows), with_poison(target, weights)
    run(short_conv(target, *buffers, step, of_states, out, channels=channels, length=length, each_alone=n == 1), n)
    expected, states[2] = reference.short_conv(rows, weights, states[2] if position else 0 * weights[1:])
    assert relative_error(read_guarded(target, out, np.float32, (n, channels)), expected) < TOLERANCE
    assert relative_error(read_guarded(target, of_states, np.float32, states.shape), states) < TOLERANCE


def test_a_step_of_a_token_moves_on_as_a_step_of_several_does(target: Device) -> None:
    """The text in steps of 1, 5 and 2 tokens, in either way, is the text at once."""
    channels, length, n = 48, 4, 8
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((n, 3, channels)).astype(np.float32)
    weights = rng.standard_normal((length, channels)).astype(np.float32)
    expected, state = reference.short_conv(rows, weights, 0 * weights[1:])
    step = StepState(target, n)
    step.write_recurrent_slot(1)
    on_device = target.upload(weights, "weights")
    of_states = with_poison(target, np.full((2, length - 1, channels), np.nan, np.float32))
    found = []
    for start, stop, each_alone in ((0, 1, False), (1, 6, False), (6, 7, True), (7, 8, True)):
        target.write(step.state, np.array([start, stop - start], np.int32))
        part, out = with_poison(target, rows[start:stop]), with_poison(target, 0 * rows[start:stop, 0])
        sizes = {"channels": channels, "length": length, "each_alone": each_alone}
        run(short_conv(target, part, on_device, step, of_states, out, **sizes), stop - start)
        found.append(read_guarded(target, out, np.float32, (stop - start, channels)))
    assert relative_error(np.concatenate(found), expected) < TOLERANCE
    states = read_guarded(target, of_states, np.float32, (2, length - 1, channels))
    assert relative_error(states[1], state) < TOLERANCE and np.isnan(states[0]).all()


@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.oclgrind)])
def test_a_bias(target: Device, n: int) -> None:
    channels, length, rng = 48, 3, np.random.default_rng(n)
    rows = rng.standard_normal((n, 3, channels)).astype(np.float32)
    weights = rng.standard_normal((length + 1, channels)).astype(np.float32)
    step = StepState(target, n)
    target.write(step.state, np.array([0, n], np.int32))
    states, out = target.zeros(4 * (length - 1) * channels, "states"), with_poison(target, 0 * rows[:, 0])
    sizes = {"channels": channels, "length": length, "bias": True, "each_alone": n == 1}
    run(short_conv(target, with_poison(target, rows), with_poison(target, weights), step, states, out, **sizes), n)
    expected, _ = reference.short_conv(rows, weights[:-1], 0 * weights[2:], weights[-1])
    assert relative_error(read_guarded(target, out, np.float32, (n, channels)), expected) < TOLERANCE


@pytest.mark.parametrize("position", [0, 5])
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_a_snapshot_on_the_way(target: Device, cut: int, position: int) -> None:
    channels, length, n = 48, 4, 5
    rng = np.random.default_rng(cut)
    rows = rng.standard_normal((n, 3, channels)).astype(np.float32)
    weights = rng.standard_normal((length, channels)).astype(np.float32)
    states = rng.standard_normal((SLOTS, length - 1, channels)).astype(np.float32)
    step = StepState(target, n)
    target.write(step.state, np.array([position, n], np.int32))
    step.write_recurrent_slot(2)
    step.write_snapshot(1, cut)
    of_states, out = with_poison(target, states), with_poison(target, np.zeros((n, channels), np.float32))
    buffers = with_poison(target, rows), with_poison(target, weights)
    run(short_conv(target, *buffers, step, of_states, out, channels=channels, length=length, each_alone=False), n)
    before = states[2] if position else 0 * weights[1:]
    _, states[1] = reference.short_conv(rows[:cut], weights, before)
    _, states[2] = reference.short_conv(rows, weights, before)
    assert relative_error(read_guarded(target, of_states, np.float32, states.shape), states) < TOLERANCE


def test_rows_of_several_sequences(target: Device) -> None:
    """Each row has the state of its own sequence; the third begins its text."""
    channels, length, sequences, slots = 80, 3, [2, 0, 1], [3, 0, 2]
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((3, 3, channels)).astype(np.float32)
    weights = rng.standard_normal((length, channels)).astype(np.float32)
    states = rng.standard_normal((SLOTS, length - 1, channels)).astype(np.float32)
    step = StepState(target, 3, n_sequences=3)
    expected = np.zeros((3, channels))
    after = states.astype(np.float64)
    for row, sequence in enumerate(sequences):
        position = 5 if row < 2 else 0
        step.write_sequence(sequence, position, 0)
        step.write_recurrent_slot(slots[sequence], sequence)
        before = states[slots[sequence]] if position else 0 * weights[1:]
        expected[row], after[slots[sequence]] = reference.short_conv(rows[row : row + 1], weights, before)
    step.write_rows(sequences, 0)
    of_states, out = with_poison(target, states), with_poison(target, np.zeros((3, channels), np.float32))
    buffers = with_poison(target, rows), with_poison(target, weights)
    run(short_conv(target, *buffers, step, of_states, out, channels=channels, length=length, each_alone=True), 3)
    assert relative_error(read_guarded(target, out, np.float32, (3, channels)), expected) < TOLERANCE
    assert relative_error(read_guarded(target, of_states, np.float32, states.shape), after) < TOLERANCE

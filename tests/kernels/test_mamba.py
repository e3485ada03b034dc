"""mamba_inputs and Mamba-2's scan (delta_rule without a correction): largest difference over the largest magnitude."""

from __future__ import annotations

import math

import numpy as np
import pytest
from delta_inputs import step_at
from helpers import read_guarded, relative_error, run, with_poison
from parameters import each_value

from llmcl import reference
from llmcl.kernels.common.step_state import StepState
from llmcl.ops.delta_rule import SOFTWARE_SEGMENT, delta_rule, gated_norm
from llmcl.ops.delta_shape import MambaShape
from llmcl.ops.mamba import MambaBuffers, mamba_inputs, mamba_mixer
from llmcl.runtime.device import Device

TOLERANCE = 2e-6
STATE_TOLERANCE = 1e-5  # what several hundred tokens add up to
SLOTS, EPS = 3, 1e-5
SMALL = MambaShape(n_heads=1, d_head=16, n_groups=1, d_state=16, length=2, conv_bias=False)
GROUPED = MambaShape(n_heads=6, d_head=32, n_groups=2, d_state=48, length=4, least_step=0.05, most_step=2.0)


def rows_of(shape: MambaShape, n: int, seed: int) -> np.ndarray:
    """Rows with time steps near 0, beyond the limits and in between."""
    rows = np.random.default_rng(seed).standard_normal((n, shape.row))
    rows[:, -shape.n_heads :] *= 4.0
    rows[n // 2, -1] = 60.0
    return rows.astype(np.float32)


def operands_of(shape: MambaShape, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the convolution's weights, bias included, and the heads' A, biases and D."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((shape.length + shape.conv_bias, shape.channels)).astype(np.float32)
    scalars = rng.standard_normal((3, shape.n_heads))
    scalars[0] = -np.exp(rng.uniform(-4.0, 2.0, shape.n_heads))
    return weights, scalars.astype(np.float32)


def inputs_of(
    shape: MambaShape, rows: np.ndarray, weights: np.ndarray, scalars: np.ndarray, state: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The twin's results."""
    bias = weights[-1] if shape.conv_bias else None
    taps = weights[: shape.length]
    before = 0 * taps[1:] if state is None else state
    return reference.mamba_inputs(rows, taps, scalars, before, bias, (shape.least_step, shape.most_step))


@each_value(("position", [5, 0]), ("n", [1, pytest.param(3, marks=pytest.mark.oclgrind), 17]))
@pytest.mark.parametrize("shape", [SMALL, GROUPED], ids=["small", "grouped"])
def test_mamba_inputs(target: Device, shape: MambaShape, n: int, position: int) -> None:
    rows, (weights, scalars) = rows_of(shape, n, n), operands_of(shape, n)
    states = np.random.default_rng(n).standard_normal((SLOTS, shape.length - 1, shape.channels)).astype(np.float32)
    if position == 0:
        states[1] = np.nan
    step = step_at(target, position, n, 1)
    state_buffer = with_poison(target, states)
    xbc = with_poison(target, np.zeros((n, shape.channels), np.float32))
    gates = with_poison(target, np.zeros((n, shape.n_heads, 2), np.float32))
    operands = [with_poison(target, array) for array in (rows, weights, scalars)]
    run(mamba_inputs(target, shape, *operands, step, state_buffer, xbc, gates, each_alone=n == 1), n)
    *expected, states[1] = inputs_of(shape, rows, weights, scalars, states[1] if position else None)
    assert relative_error(read_guarded(target, xbc, np.float32, (n, shape.channels)), expected[0]) < TOLERANCE
    read = read_guarded(target, gates, np.float32, (n, shape.n_heads, 2))
    np.testing.assert_allclose(read, expected[1], rtol=3e-5, atol=1e-30)
    assert relative_error(read_guarded(target, state_buffer, np.float32, states.shape), states) < TOLERANCE


@each_value(("position", [5, 0]), ("n", [1, pytest.param(3, marks=pytest.mark.oclgrind), 2 * SOFTWARE_SEGMENT + 3]))
@pytest.mark.parametrize("shape", [SMALL, GROUPED], ids=["small", "grouped"])
def test_the_scan(target: Device, shape: MambaShape, n: int, position: int) -> None:
    weights, scalars = operands_of(shape, n)
    xbc, gates, _ = (array.astype(np.float32) for array in inputs_of(shape, rows_of(shape, n, n), weights, scalars))
    matrix = SLOTS, shape.n_heads, shape.d_state, shape.d_head
    states = np.random.default_rng(1).standard_normal(matrix).astype(np.float32)
    if position == 0:
        states[2] = np.nan
    step = step_at(target, position, n, 2)
    cut = 2 if n > 2 else 0
    if cut:
        step.write_snapshot(1, cut)
    state_buffer, scalar_buffer = with_poison(target, states), with_poison(target, scalars)
    out = with_poison(target, np.zeros((n, shape.inner), np.float32))
    operands = with_poison(target, xbc), with_poison(target, gates), step, state_buffer, out
    run(delta_rule(target, shape.scan, *operands, each_alone=n == 1, scalars=scalar_buffer), n)
    before = states[2] if position else np.zeros(matrix[1:])
    if cut:
        _, states[1] = reference.mamba_scan(xbc[:cut], gates[:cut], scalars[2], before, n_groups=shape.n_groups)
    expected, states[2] = reference.mamba_scan(xbc, gates, scalars[2], before, n_groups=shape.n_groups)
    assert relative_error(read_guarded(target, out, np.float32, expected.shape), expected) < STATE_TOLERANCE
    assert relative_error(read_guarded(target, state_buffer, np.float32, matrix), states) < STATE_TOLERANCE


@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.oclgrind)])
@pytest.mark.parametrize("shape", [SMALL, GROUPED], ids=["small", "grouped"])
def test_the_gate_comes_before_the_norm(target: Device, shape: MambaShape, n: int) -> None:
    rng = np.random.default_rng(n)
    x = rng.standard_normal((n, shape.n_groups, shape.inner // shape.n_groups)).astype(np.float32)
    x[:, 0] *= 1e-2  # eps counts
    rows, weight = rows_of(shape, n, n), rng.standard_normal(x.shape[1:]).astype(np.float32)
    buffer = with_poison(target, x)
    run(gated_norm(target, shape, buffer, with_poison(target, weight), with_poison(target, rows), EPS), n)
    gates = rows[:, shape.channels : -shape.n_heads].reshape(x.shape)
    expected = reference.gated_norm(x, weight, gates, EPS, gate_first=True)
    assert relative_error(read_guarded(target, buffer, np.float32, x.shape), expected) < TOLERANCE


def test_rows_of_several_sequences(target: Device) -> None:
    """Each row has the state of its own sequence; the third begins its text."""
    shape, sequences, slots = GROUPED, [2, 0, 1], [1, 2, 0]
    rng, rows, (weights, scalars) = np.random.default_rng(2), rows_of(GROUPED, 3, 8), operands_of(GROUPED, 8)
    inputs = rng.standard_normal((SLOTS, shape.length - 1, shape.channels)).astype(np.float32)
    matrices = rng.standard_normal((SLOTS, shape.n_heads, shape.d_state, shape.d_head)).astype(np.float32)
    norm = rng.standard_normal((shape.n_groups, shape.inner // shape.n_groups)).astype(np.float32)
    step = StepState(target, 3, n_sequences=3)
    after_inputs, after, outputs = inputs.astype(np.float64), matrices.astype(np.float64), []
    for row, sequence in enumerate(sequences):
        step.write_sequence(sequence, 5 if row < 2 else 0, 0)
        slot, begins = slots[sequence], row == 2
        step.write_recurrent_slot(slot, sequence)
        part = rows[row : row + 1]
        xbc, gates, after_inputs[slot] = inputs_of(shape, part, weights, scalars, None if begins else inputs[slot])
        before = matrices[slot] * (not begins)
        y, after[slot] = reference.mamba_scan(xbc, gates, scalars[2], before, n_groups=shape.n_groups)
        z = part[:, shape.channels : -shape.n_heads].reshape(1, *norm.shape)
        outputs.append(reference.gated_norm(y.reshape(z.shape), norm, z, EPS, gate_first=True))
    step.write_rows(sequences, 0)
    arrays = weights, scalars, norm, inputs, matrices, rows
    sizes = (3, shape.channels), (3, shape.n_heads, 2), (3, *norm.shape)
    scratch = (np.zeros(size, np.float32) for size in sizes)
    buffers = MambaBuffers(*(with_poison(target, array) for array in (*arrays, *scratch)))
    run(mamba_mixer(target, shape, buffers, step, eps=EPS, each_alone=True), 3)
    expected = np.concatenate(outputs)
    assert relative_error(read_guarded(target, buffers.out, np.float32, expected.shape), expected) < STATE_TOLERANCE
    assert relative_error(read_guarded(target, buffers.inputs, np.float32, inputs.shape), after_inputs) < TOLERANCE
    assert relative_error(read_guarded(target, buffers.matrix, np.float32, matrices.shape), after) < STATE_TOLERANCE


def test_the_twin_scans_as_transformers_does() -> None:
    """In chunks there, token by token here; with groups of heads, limits of the time steps and a state before."""
    import torch
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan

    shape, n = GROUPED, 21
    rng, (_, scalars) = np.random.default_rng(1), operands_of(GROUPED, 1)
    xbc, raw = rng.standard_normal((n, shape.channels)), 4.0 * rng.standard_normal((n, shape.n_heads))
    state = rng.standard_normal((shape.n_heads, shape.d_state, shape.d_head))
    limits = (shape.least_step, shape.most_step)
    steps = np.clip(np.log1p(np.exp(raw + scalars[1])), *limits)
    gates = np.stack([np.exp(steps * scalars[0]), steps], axis=-1)
    out, after = reference.mamba_scan(xbc, gates, scalars[2], state, n_groups=shape.n_groups)
    x, b, c = (
        torch.tensor(part)[None] for part in np.split(xbc, [shape.inner, shape.inner + math.prod((2, 48))], axis=1)
    )
    a, dt_bias, d = (torch.tensor(row, dtype=torch.float64) for row in scalars)
    theirs, theirs_after = mamba2_chunk_scan(
        x.view(1, n, shape.n_heads, shape.d_head),
        torch.tensor(raw)[None],
        a,
        b.view(1, n, shape.n_groups, shape.d_state),
        c.view(1, n, shape.n_groups, shape.d_state),
        chunk_size=8,
        D=d,
        dt_bias=dt_bias,
        initial_states=torch.tensor(state.swapaxes(1, 2).copy())[None],
        dt_softplus=True,
        dt_limit=limits,
        return_final_states=True,
    )
    assert relative_error(out, theirs[0].numpy()) < 1e-5  # transformers computes parts in float32
    assert relative_error(after, theirs_after[0].numpy().swapaxes(1, 2)) < 1e-5

"""delta_inputs, delta_rule and gated_norm: largest difference over the largest expected magnitude."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from delta_inputs import GROUPED, IN_TURN, SMALL, made_inputs, made_rows, step_at
from helpers import read_guarded, relative_error, run, with_poison
from parameters import each_value

from llmcl import reference
from llmcl.kernels.common.step_state import StepState
from llmcl.ops.delta_rule import SOFTWARE_SEGMENT, delta_inputs, delta_rule, gated_norm
from llmcl.ops.delta_shape import DeltaShape
from llmcl.runtime.device import Device

TOLERANCE = 2e-6
STATE_TOLERANCE = 1e-5  # what several hundred tokens add up to
SLOTS, EPS = 3, 1e-6

SHAPES = [SMALL, GROUPED, IN_TURN]
NAMES = ["small", "grouped", "in turn"]


@each_value(("position", [5, 0]), ("n", [1, pytest.param(3, marks=pytest.mark.oclgrind), 17]))
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_delta_inputs(target: Device, shape: DeltaShape, n: int, position: int) -> None:
    rng = np.random.default_rng(n + position)
    rows = made_rows(shape, n, n)
    weights = rng.standard_normal((shape.length, shape.channels)).astype(np.float32)
    scalars = np.stack([-np.exp(rng.uniform(-4.0, 2.0, shape.n_v)), rng.standard_normal(shape.n_v)]).astype(np.float32)
    states = rng.standard_normal((SLOTS, shape.length - 1, shape.channels)).astype(np.float32)
    if position == 0:
        states[1] = np.nan
    step = step_at(target, position, n, 1)
    of_states = with_poison(target, states)
    qkv = with_poison(target, np.zeros((n, shape.channels), np.float32))
    gates = with_poison(target, np.zeros((n, shape.n_v, 2), np.float32))
    given = [with_poison(target, array) for array in (rows, weights, scalars)]
    run(delta_inputs(target, shape, *given, step, of_states, qkv, gates, each_alone=n == 1), n)
    before = states[1] if position else 0 * weights[1:]
    sizes = {"n_k": shape.n_k, "d_k": shape.d_k}
    *expected, states[1] = reference.delta_inputs(rows, weights, scalars, before, **sizes)
    assert relative_error(read_guarded(target, qkv, np.float32, (n, shape.channels)), expected[0]) < TOLERANCE
    found = read_guarded(target, gates, np.float32, (n, shape.n_v, 2))
    np.testing.assert_allclose(found, expected[1], rtol=3e-5, atol=1e-30)  # powers of numbers near 1, and near 0
    assert relative_error(read_guarded(target, of_states, np.float32, states.shape), states) < TOLERANCE


@each_value(("position", [5, 0]), ("n", [1, pytest.param(3, marks=pytest.mark.oclgrind), 2 * SOFTWARE_SEGMENT + 3]))
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_delta_rule(target: Device, shape: DeltaShape, n: int, position: int) -> None:
    target.entry = dataclasses.replace(target.entry, local_mem_bytes=0)  # too little for chunks (test_delta_chunks.py)
    qkv, gates = made_inputs(shape, n, n)
    states = np.random.default_rng(1).standard_normal((SLOTS, shape.n_v, shape.d_k, shape.d_v)).astype(np.float32)
    if position == 0:
        states[2] = np.nan
    step = step_at(target, position, n, 2)
    of_states = with_poison(target, states)
    out = with_poison(target, np.zeros((n, shape.n_v, shape.d_v), np.float32))
    given = with_poison(target, qkv), with_poison(target, gates)
    run(delta_rule(target, shape, *given, step, of_states, out, each_alone=n == 1), n)
    before = states[2] if position else np.zeros(states.shape[1:])
    grouping = {"n_k": shape.n_k, "heads_in_turn": shape.heads_in_turn}
    expected, states[2] = reference.delta_rule(qkv, gates, before, **grouping)
    assert relative_error(read_guarded(target, out, np.float32, expected.shape), expected) < STATE_TOLERANCE
    assert relative_error(read_guarded(target, of_states, np.float32, states.shape), states) < STATE_TOLERANCE


@pytest.mark.parametrize("cut", [1, SOFTWARE_SEGMENT - 1, SOFTWARE_SEGMENT, SOFTWARE_SEGMENT + 2])
def test_a_snapshot_on_the_way(target: Device, cut: int) -> None:
    """Also at the end of a launch, where a software renderer has several."""
    target.entry = dataclasses.replace(target.entry, local_mem_bytes=0, is_software=True)
    shape, n = GROUPED, SOFTWARE_SEGMENT + 3
    qkv, gates = made_inputs(shape, n, n)
    states = np.random.default_rng(1).standard_normal((SLOTS, shape.n_v, shape.d_k, shape.d_v)).astype(np.float32)
    step = step_at(target, 5, n, 2)
    step.write_snapshot(1, cut)
    of_states, out = with_poison(target, states), with_poison(target, np.zeros((n, shape.n_v, shape.d_v), np.float32))
    given = with_poison(target, qkv), with_poison(target, gates)
    run(delta_rule(target, shape, *given, step, of_states, out, each_alone=False), n)
    _, states[1] = reference.delta_rule(qkv[:cut], gates[:cut], states[2], n_k=shape.n_k)
    expected, states[2] = reference.delta_rule(qkv, gates, states[2], n_k=shape.n_k)
    assert relative_error(read_guarded(target, out, np.float32, expected.shape), expected) < STATE_TOLERANCE
    assert relative_error(read_guarded(target, of_states, np.float32, states.shape), states) < STATE_TOLERANCE


def test_rows_of_several_sequences(target: Device) -> None:
    """Each row has the state of its own sequence; the third begins its text."""
    shape, sequences, slots = GROUPED, [2, 0, 1], [1, 2, 0]
    qkv, gates = made_inputs(shape, 3, 8)
    states = np.random.default_rng(2).standard_normal((SLOTS, shape.n_v, shape.d_k, shape.d_v)).astype(np.float32)
    step = StepState(target, 3, n_sequences=3)
    expected, after = np.zeros((3, shape.n_v, shape.d_v)), states.astype(np.float64)
    for row, sequence in enumerate(sequences):
        step.write_sequence(sequence, 5 if row < 2 else 0, 0)
        step.write_recurrent_slot(slots[sequence], sequence)
        before = states[slots[sequence]] if row < 2 else 0 * states[0]
        of_row = slice(row, row + 1)
        found, after[slots[sequence]] = reference.delta_rule(qkv[of_row], gates[of_row], before, n_k=shape.n_k)
        expected[row] = found[0]
    step.write_rows(sequences, 0)
    of_states, out = with_poison(target, states), with_poison(target, np.zeros(expected.shape, np.float32))
    given = with_poison(target, qkv), with_poison(target, gates)
    run(delta_rule(target, shape, *given, step, of_states, out, each_alone=True), 3)
    assert relative_error(read_guarded(target, out, np.float32, expected.shape), expected) < TOLERANCE
    assert relative_error(read_guarded(target, of_states, np.float32, states.shape), after) < TOLERANCE


@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.oclgrind)])
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_gated_norm(target: Device, shape: DeltaShape, n: int) -> None:
    rng = np.random.default_rng(n)
    x = rng.standard_normal((n, shape.n_v, shape.d_v)).astype(np.float32)
    x[:, 0] *= 1e-3  # eps counts
    rows, weight = made_rows(shape, n, n), rng.standard_normal(shape.d_v).astype(np.float32)
    buffer = with_poison(target, x)
    run(gated_norm(target, shape, buffer, with_poison(target, weight), with_poison(target, rows), EPS), n)
    gates = rows[:, shape.channels : -2 * shape.n_v].reshape(x.shape)
    expected = reference.gated_norm(x, weight, gates, EPS)
    assert relative_error(read_guarded(target, buffer, np.float32, x.shape), expected) < TOLERANCE

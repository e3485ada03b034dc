"""delta_token: largest difference over the largest expected magnitude."""

from __future__ import annotations

import numpy as np
import pytest
from delta_inputs import GROUPED, IN_TURN, SMALL, made_rows
from helpers import read_guarded, relative_error, run, with_poison

from llmcl import reference
from llmcl.kernels.common.step_state import StepState
from llmcl.ops.delta_shape import DeltaShape
from llmcl.ops.delta_token import delta_token
from llmcl.runtime.device import Device

TOLERANCE = 5e-6
EPS = 1e-6
WIDE = DeltaShape(n_k=2, n_v=6, d_k=256, d_v=80, length=2)
SHAPES = {"small": SMALL, "grouped": GROUPED, "in turn": IN_TURN, "wide": WIDE}


@pytest.mark.parametrize(
    ("shape", "positions"),
    [
        pytest.param(SMALL, [5], marks=pytest.mark.oclgrind, id="small-1"),
        *(pytest.param(shape, [7, 0, 5], id=name) for name, shape in SHAPES.items()),
    ],
)
def test_delta_token(target: Device, shape: DeltaShape, positions: list[int]) -> None:
    """Rows of several sequences, each with the states of its own; one begins its text."""
    n, rng = len(positions), np.random.default_rng(len(positions))
    rows = made_rows(shape, n, n)
    weights = rng.standard_normal((shape.length, shape.channels)).astype(np.float32)
    scalars = np.stack([-np.exp(rng.uniform(-4.0, 2.0, shape.n_v)), rng.standard_normal(shape.n_v)]).astype(np.float32)
    norm = rng.standard_normal(shape.d_v).astype(np.float32)
    inputs = rng.standard_normal((n + 1, shape.length - 1, shape.channels)).astype(np.float32)
    states = rng.standard_normal((n + 1, shape.n_v, shape.d_k, shape.d_v)).astype(np.float32)
    slots = [(i + 2) % (n + 1) for i in range(n)]
    step = StepState(target, n, n_sequences=n)
    for row, position in enumerate(positions):
        step.write_sequence(row, position, 0)
        step.write_recurrent_slot(slots[row], row)
        if position == 0:
            inputs[slots[row]] = states[slots[row]] = np.nan
    step.write_rows([*range(n)], 0)
    of_inputs, of_states = with_poison(target, inputs), with_poison(target, states)
    out = with_poison(target, np.zeros((n, shape.n_v, shape.d_v), np.float32))
    given = [with_poison(target, array) for array in (rows, weights, scalars, norm)]
    run(delta_token(target, shape, *given, step, of_inputs, of_states, out, eps=EPS), n)

    expected = np.zeros((n, shape.n_v, shape.d_v))
    heads = {"n_k": shape.n_k, "heads_in_turn": shape.heads_in_turn}
    for row, slot in enumerate(slots):
        past = [x[slot] if positions[row] else 0.0 * np.nan_to_num(x[slot]) for x in (inputs, states)]
        one = rows[row : row + 1]
        qkv, gates, inputs[slot] = reference.delta_inputs(one, weights, scalars, past[0], n_k=shape.n_k, d_k=shape.d_k)
        y, states[slot] = reference.delta_rule(qkv, gates, past[1], **heads)
        z = one[:, shape.channels : -2 * shape.n_v].reshape(y.shape)
        expected[row] = reference.gated_norm(y, norm, z, EPS)[0]
    assert relative_error(read_guarded(target, out, np.float32, expected.shape), expected) < TOLERANCE
    assert relative_error(read_guarded(target, of_inputs, np.float32, inputs.shape), inputs) < TOLERANCE
    assert relative_error(read_guarded(target, of_states, np.float32, states.shape), states) < TOLERANCE

"""layer_inputs and gate_inputs: largest difference over the largest expected magnitude."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import read_guarded, relative_error, run, step_state_at, weight_on_device, with_poison

from llmcl import reference
from llmcl.ops.layer_inputs import gate_inputs, layer_inputs
from llmcl.runtime.device import Device

TOLERANCE = 2e-6
EPS = 1e-3


@pytest.mark.parametrize("tiles_per_part", [0, 2])
@pytest.mark.parametrize(
    ("n", "n_layers", "size"), [(1, 2, 16), (5, 3, 80), pytest.param(3, 2, 256, marks=pytest.mark.oclgrind)]
)
def test_layer_inputs(target: Device, n: int, n_layers: int, size: int, tiles_per_part: int) -> None:
    """Also of a table in several buffers."""
    rng = np.random.default_rng(size)
    vocab, shape = 70, (n, n_layers, size)
    table = rng.standard_normal((vocab, n_layers * size)).astype(np.float32)
    norm, x = rng.standard_normal(size).astype(np.float32), rng.standard_normal(shape).astype(np.float32)
    tokens = rng.integers(0, vocab, n)
    step = step_state_at(target, position=3, n_tokens=n)
    target.write(step.tokens, tokens.astype(np.int32))
    buffer = with_poison(target, x)
    weight = weight_on_device(target, table, "float32", tiles_per_part=tiles_per_part)
    run(layer_inputs(target, weight, with_poison(target, norm), step, buffer, n_layers=n_layers, eps=EPS), n)
    expected = reference.layer_inputs(x, norm, table[tokens].reshape(shape), EPS)
    assert relative_error(read_guarded(target, buffer, np.float32, shape), expected) < TOLERANCE


@pytest.mark.parametrize("kind", ["swiglu", "geglu"])
@pytest.mark.parametrize(("n", "columns"), [(1, 16), pytest.param(17, 80, marks=pytest.mark.oclgrind)])
def test_gate_inputs(target: Device, n: int, columns: int, kind: str) -> None:
    rng = np.random.default_rng(columns)
    gate = rng.standard_normal((n, columns)).astype(np.float32)
    x = rng.standard_normal((n, 3 * columns)).astype(np.float32)
    buffer = with_poison(target, gate)
    sizes: dict[str, Any] = {"columns": columns, "row": 3 * columns, "first": columns}
    run(gate_inputs(target, buffer, with_poison(target, x), kind, **sizes), n)
    expected = reference.gate_inputs(gate, x[:, columns : 2 * columns], kind)
    assert relative_error(read_guarded(target, buffer, np.float32, gate.shape), expected) < TOLERANCE

"""delta_terms and delta_chunks: largest difference over the largest expected magnitude."""

from __future__ import annotations

import numpy as np
import pytest
from delta_inputs import GROUPED, IN_TURN, SMALL, made_inputs, step_at
from helpers import FLOAT64, read_guarded, relative_error, run, with_poison
from parameters import each_value

from llmcl import reference
from llmcl.ops.delta_chunks import CHUNK, ChunkSizes, chunk_sizes, delta_chunks, scratch_values
from llmcl.ops.delta_shape import DeltaShape
from llmcl.runtime.device import Device

TOLERANCE = 1e-5  # what the tokens of a chunk add up to, and of several chunks
WIDE = DeltaShape(n_k=1, n_v=2, d_k=256, d_v=256, length=4)
ODD = DeltaShape(n_k=1, n_v=3, d_k=80, d_v=144, length=4)
SHAPES = {"small": SMALL, "grouped": GROUPED, "in turn": IN_TURN, "wide": WIDE, "odd": ODD}


@pytest.fixture
def sizes(target: Device, shape: DeltaShape) -> ChunkSizes:
    found = chunk_sizes(target, shape)
    if found is None:
        pytest.skip("the delta rule goes token by token here")
    return found


@pytest.mark.parametrize("n", [1, 31, 33, 70])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_twin_of_chunks_is_that_of_tokens(shape: DeltaShape, n: int) -> None:
    qkv, gates = made_inputs(shape, n, n)
    gates[n // 2, 0, 0] = 0.0  # forgets all
    state = np.random.default_rng(1).standard_normal((shape.n_v, shape.d_k, shape.d_v))
    grouping = {"n_k": shape.n_k, "heads_in_turn": shape.heads_in_turn}
    expected = reference.delta_rule(qkv, gates, state, **grouping)
    for chunk in (4, 32):
        found = reference.delta_chunks(qkv, gates, state, chunk=chunk, **grouping)
        for one, other in zip(found, expected, strict=True):
            assert relative_error(one, other) < FLOAT64


@each_value(
    ("position", [0, 5]),
    (
        "shape,n",
        [
            pytest.param(SMALL, CHUNK + 1, marks=pytest.mark.oclgrind, id="small-33"),
            *(pytest.param(shape, n, id=f"{name}-{n}") for name, shape in SHAPES.items() for n in (1, CHUNK, 67)),
        ],
    ),
)
def test_delta_chunks(target: Device, sizes: ChunkSizes, shape: DeltaShape, n: int, position: int) -> None:
    qkv, gates = made_inputs(shape, n, n)
    gates[n // 2, 0, 0] = 0.0
    states = np.random.default_rng(1).standard_normal((3, shape.n_v, shape.d_k, shape.d_v)).astype(np.float32)
    if position == 0:
        states[2] = np.nan
    step = step_at(target, position, n, 2)
    of_states, out = with_poison(target, states), with_poison(target, np.zeros((n, shape.n_v, shape.d_v), np.float32))
    given = with_poison(target, qkv), with_poison(target, gates)
    launches = delta_chunks(target, shape, sizes, *given, step, of_states, out)
    grouping = {"n_k": shape.n_k, "heads_in_turn": shape.heads_in_turn}

    run(launches[:1], n)
    w, u, b, factors = reference.delta_terms(qkv, gates, d_k=shape.d_k, chunk=CHUNK, **grouping)
    assert relative_error(read_guarded(target, out, np.float32, u.shape), u) < TOLERANCE
    for name, expected in zip(scratch_values(shape), (w, b, factors), strict=True):
        found = target.read(step.scratch(name, 0), np.float32, expected.shape)
        assert relative_error(found, expected) < TOLERANCE, name

    run(launches[1:], n)
    before = states[2] if position else np.zeros(states.shape[1:])
    expected, states[2] = reference.delta_rule(qkv, gates, before, **grouping)
    assert relative_error(read_guarded(target, out, np.float32, expected.shape), expected) < TOLERANCE
    assert relative_error(read_guarded(target, of_states, np.float32, states.shape), states) < TOLERANCE


@pytest.mark.parametrize("shape", [GROUPED], ids=["grouped"])
@pytest.mark.parametrize("cut", [1, 20, CHUNK, CHUNK + 8, 66])
def test_a_snapshot_on_the_way(target: Device, sizes: ChunkSizes, shape: DeltaShape, cut: int) -> None:
    """Chunks end where it is taken."""
    n = 67
    qkv, gates = made_inputs(shape, n, n)
    states = np.random.default_rng(1).standard_normal((3, shape.n_v, shape.d_k, shape.d_v)).astype(np.float32)
    step = step_at(target, 5, n, 2)
    step.write_snapshot(1, cut)
    of_states, out = with_poison(target, states), with_poison(target, np.zeros((n, shape.n_v, shape.d_v), np.float32))
    run(
        delta_chunks(target, shape, sizes, with_poison(target, qkv), with_poison(target, gates), step, of_states, out),
        n,
    )
    _, states[1] = reference.delta_rule(qkv[:cut], gates[:cut], states[2], n_k=shape.n_k)
    expected, states[2] = reference.delta_rule(qkv, gates, states[2], n_k=shape.n_k)
    assert relative_error(read_guarded(target, out, np.float32, expected.shape), expected) < TOLERANCE
    assert relative_error(read_guarded(target, of_states, np.float32, states.shape), states) < TOLERANCE

"""Shapes and inputs of the gated delta rule for the tests of its kernels."""

from __future__ import annotations

import numpy as np

from llmcl import reference
from llmcl.kernels.common.step_state import StepState
from llmcl.ops.delta_shape import DeltaShape
from llmcl.runtime.device import Device

SMALL = DeltaShape(n_k=1, n_v=1, d_k=32, d_v=16, length=4)
GROUPED = DeltaShape(n_k=2, n_v=6, d_k=32, d_v=48, length=3)
IN_TURN = DeltaShape(n_k=2, n_v=4, d_k=128, d_v=128, length=4, heads_in_turn=True)


def step_at(device: Device, position: int, n: int, slot: int) -> StepState:
    step = StepState(device, n)
    device.write(step.state, np.array([position, n], np.int32))
    step.write_recurrent_slot(slot)
    return step


def made_rows(shape: DeltaShape, n: int, seed: int) -> np.ndarray:
    """With decays and rates near 0, near 1 and in between."""
    rows = np.random.default_rng(seed).standard_normal((n, shape.row))
    rows[:, -2 * shape.n_v :] *= 4.0
    rows[n // 2, -1] = 60.0
    return rows.astype(np.float32)


def made_inputs(shape: DeltaShape, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries, keys and values as delta_inputs leaves them, and gates."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((shape.length, shape.channels))
    scalars = np.stack([-np.exp(rng.uniform(-4.0, 2.0, shape.n_v)), rng.standard_normal(shape.n_v)])
    sizes = {"n_k": shape.n_k, "d_k": shape.d_k}
    qkv, gates, _ = reference.delta_inputs(made_rows(shape, n, seed), weights, scalars, 0 * weights[1:], **sizes)
    return qkv.astype(np.float32), gates.astype(np.float32)

"""Checks recurrent-layer kernels against their NumPy twins, for `llmcl doctor`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from llmcl import reference
from llmcl.kernels.common.step_state import StepState
from llmcl.ops.delta_net import DeltaBuffers, delta_net
from llmcl.ops.delta_shape import DeltaShape, MambaShape
from llmcl.ops.mamba import MambaBuffers, mamba_mixer
from llmcl.ops.short_conv import short_conv
from llmcl.runtime.device import Device, Launch
from llmcl.tools.trials import relative_error

N_TOKENS = 37  # one chunk of the delta rule plus a partial chunk
SHAPE = DeltaShape(n_k=2, n_v=4, d_k=32, d_v=32, length=4)
MAMBA_SHAPE = MambaShape(n_heads=4, d_head=32, n_groups=2, d_state=32, length=4)
EPS = 1e-6


def short_conv_error(device: Device) -> float:
    """Returns the larger error from two steps: several tokens, then one token."""
    channels, length = 48, 3
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((N_TOKENS + 1, 3, channels)).astype(np.float32)
    weights = rng.standard_normal((length, channels)).astype(np.float32)
    states, out = device.zeros(4 * (length - 1) * channels, "trial states"), device.alloc(rows.nbytes, "trial rows")
    inputs, taps = device.alloc(rows.nbytes, "trial inputs"), device.upload(weights, "trial weights")
    expected, state = reference.short_conv(rows, weights, np.zeros((length - 1, channels)))
    errors = []
    for step, part in _steps(device):
        device.write(inputs, rows[part])
        n = part.stop - part.start
        operands = inputs, taps, step, states, out
        _run(short_conv(device, *operands, channels=channels, length=length, each_alone=n == 1), n)
        errors.append(relative_error(device.read(out, np.float32, (n, channels)), expected[part]))
    return max(*errors, relative_error(device.read(states, np.float32, state.shape), state))


def delta_net_error(device: Device) -> float:
    """Returns the larger error from two steps: several tokens, then one token."""
    shape, rng, n_all = SHAPE, np.random.default_rng(0), N_TOKENS + 1
    rows = rng.standard_normal((n_all, shape.row)).astype(np.float32)
    weights = rng.standard_normal((shape.length, shape.channels)).astype(np.float32)
    scalars = np.stack([-np.exp(rng.uniform(-4.0, 1.0, shape.n_v)), rng.standard_normal(shape.n_v)]).astype(np.float32)
    norm = rng.standard_normal(shape.d_v).astype(np.float32)
    matrix_shape = shape.n_v, shape.d_k, shape.d_v
    qkv, gates, _ = reference.delta_inputs(rows, weights, scalars, 0.0 * weights[1:], n_k=shape.n_k, d_k=shape.d_k)
    expected, matrix = reference.delta_rule(qkv, gates, np.zeros(matrix_shape), n_k=shape.n_k)
    z = rows[:, shape.channels : shape.channels + shape.n_v * shape.d_v].reshape(expected.shape)
    expected = reference.gated_norm(expected, norm, z, EPS)

    row_buffer, taps, of_heads, of_norm = (device.upload(x, "trial values") for x in (rows, weights, scalars, norm))
    inputs = device.zeros(4 * (shape.length - 1) * shape.channels, "trial inputs before")
    states = device.zeros(4 * matrix.size, "trial states")
    results = (device.alloc(4 * x.size, "trial results") for x in (qkv, gates, expected))
    buffers = DeltaBuffers(taps, of_heads, of_norm, inputs, states, row_buffer, *results)
    errors = []
    for step, part in _steps(device):
        device.write(row_buffer, rows[part])
        n = part.stop - part.start
        _run(delta_net(device, shape, buffers, step, eps=EPS, each_alone=n == 1), n)
        errors.append(relative_error(device.read(buffers.out, np.float32, (n, shape.n_v, shape.d_v)), expected[part]))
    return max(*errors, relative_error(device.read(states, np.float32, matrix_shape), matrix))


def mamba_error(device: Device) -> float:
    """Returns the larger error from two steps: several tokens, then one token."""
    shape, rng, n_all = MAMBA_SHAPE, np.random.default_rng(0), N_TOKENS + 1
    rows = rng.standard_normal((n_all, shape.row)).astype(np.float32)
    weights = rng.standard_normal((shape.length + 1, shape.channels)).astype(np.float32)
    scalars = rng.standard_normal((3, shape.n_heads)).astype(np.float32)
    scalars[0] = -np.exp(scalars[0])
    norm = rng.standard_normal((shape.n_groups, shape.inner // shape.n_groups)).astype(np.float32)
    xbc, gates, _ = reference.mamba_inputs(rows, weights[:-1], scalars, 0.0 * weights[2:], weights[-1])
    before = np.zeros((shape.n_heads, shape.d_state, shape.d_head))
    expected, matrix = reference.mamba_scan(xbc, gates, scalars[2], before, n_groups=shape.n_groups)
    z = rows[:, shape.channels : -shape.n_heads].reshape(n_all, *norm.shape)
    expected = reference.gated_norm(expected.reshape(z.shape), norm, z, EPS, gate_first=True)

    row_buffer, taps, of_heads, of_norm = (device.upload(x, "trial values") for x in (rows, weights, scalars, norm))
    inputs = device.zeros(4 * (shape.length - 1) * shape.channels, "trial inputs before")
    states = device.zeros(4 * matrix.size, "trial states")
    results = (device.alloc(4 * x.size, "trial results") for x in (xbc, gates, expected))
    buffers = MambaBuffers(taps, of_heads, of_norm, inputs, states, row_buffer, *results)
    errors = []
    for step, part in _steps(device):
        device.write(row_buffer, rows[part])
        n = part.stop - part.start
        _run(mamba_mixer(device, shape, buffers, step, eps=EPS, each_alone=n == 1), n)
        errors.append(relative_error(device.read(buffers.out, np.float32, (n, *norm.shape)), expected[part]))
    return max(*errors, relative_error(device.read(states, np.float32, matrix.shape), matrix))


def _steps(device: Device) -> Iterable[tuple[StepState, slice]]:
    """Yields a step with N_TOKENS from position 0, then a step with the next token, each with its rows."""
    for part in (slice(0, N_TOKENS), slice(N_TOKENS, N_TOKENS + 1)):
        step = StepState(device, part.stop - part.start)
        device.write(step.state, np.array([part.start, part.stop - part.start], np.int32))
        step.write_recurrent_slot(0)
        yield step, part


def _run(launches: Iterable[Launch], n: int) -> None:
    for launch in launches:
        launch.enqueue(n)

"""The ops of layers that keep a state of fixed size in place of keys and values."""

from __future__ import annotations

import numpy as np

from llmcl.reference.arrays import Array, Float64, wide


def causal_conv(u: Array, weights: Array, state: Array) -> tuple[Float64, Float64]:
    """Each channel's convolution with its last inputs: y[t] = sum_j weights[j] u[t - length + 1 + j].

    u [n, channels], weights [length, channels], state [length - 1, channels]: the inputs before u, 0 before a text
    -> y [n, channels] and the state after u.
    """
    length = len(weights)
    inputs = np.concatenate([wide(state), wide(u)])
    y = sum(wide(weights[j]) * inputs[j : j + len(u)] for j in range(length))
    return np.asarray(y), inputs[len(inputs) - (length - 1) :]


def short_conv(rows: Array, weights: Array, state: Array) -> tuple[Float64, Float64]:
    """c conv(b x): rows [n, 3, channels] of b, c, x; weights, state as of causal_conv -> [n, channels], new state."""
    b, c, x = np.moveaxis(wide(rows), 1, 0)
    y, state = causal_conv(b * x, weights, state)
    return c * y, state

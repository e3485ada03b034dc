"""linear_heads: multiplies each head's values by the head's own matrix."""

from __future__ import annotations

import numpy as np

from llmcl.kernels import table
from llmcl.kernels.common.cost import linear_cost
from llmcl.kernels.common.dtype import TILE_ROWS, kernel_name
from llmcl.kernels.common.latent import LinearHeads
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight
from llmcl.runtime.device import Buffer, Device, Launch


def linear_heads(
    device: Device,
    weight: Weight,
    x: Buffer,
    out: Buffer,
    step: StepState,
    *,
    n_heads: int,
    x_stride: int,
    variant: str | None = None,
) -> list[Launch]:
    """Computes out[t][h] = W[h] x[t][h] for all rows of the step.

    weight [n_heads n, k], the heads' matrices stacked by rows; x float32 [rows, n_heads, x_stride], where only the
    first k values count; out float32 [rows, n_heads, n]; n, k and x_stride multiples of 16.
    """
    launches = []
    n = weight.rows // n_heads
    for part in weight.parts:
        row = table.pick(LinearHeads, device, part.dtype, weight.k, variant)
        size_constants, groups, local = row.size(device, weight, part)
        constants: dict[str, object] = {
            **step.constants,
            "WEIGHT": kernel_name(part.dtype),
            "K": weight.k,
            "N": n,
            "X_STRIDE": x_stride,
            "N_HEADS": n_heads,
            **size_constants,
        }
        rows = part.n_tiles * TILE_ROWS
        launches.append(
            device.launch(
                row.file,
                "linear_heads",
                constants,
                [part.buffer, x, out, step.state, np.int32(part.first_tile), np.int32(part.n_tiles)],
                groups=groups,
                local=local,
                cost=linear_cost(part.buffer.nbytes, rows, weight.k, rows),
            )
        )
    return launches

"""add_positions: adds learned embeddings of positions and token types."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import local_size
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def add_positions(
    device: Device, step: StepState, x: Buffer, positions: Buffer, types: Buffer, second: Buffer, columns: int
) -> list[Launch]:
    """Computes x[t] += positions[p] + types[p >= second[0]] with p the position of the step's consecutive token t.

    x float32 [n, columns], positions float32 [rows, columns], types float32 [1 or 2, columns], second int32 [1].
    """
    size = local_size(device, 64)
    return op_launches(
        device,
        "add_positions",
        {"COLUMNS": columns, "LOCAL_SIZE": size, **step.constants},
        [step.state, positions, types, second, x],
        groups=lambda n: (-(-columns // size), n),
        local=(size, 1),
        cost=per_token(16 * columns),
    )

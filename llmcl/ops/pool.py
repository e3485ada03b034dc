"""pool: one row for a text, from the rows of its tokens."""

from __future__ import annotations

from llmcl.architectures.embedding import POOLINGS, Pooling
from llmcl.kernels.common.sizes import local_size
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def pool(device: Device, step: StepState, x: Buffer, rows: Buffer, pooling: Pooling, row: int, hidden: int) -> Launch:
    """Adds a step's rows x, float32 [n, hidden], to a text's row: number `row` of `rows`, float32 [row + 1, hidden].

    The step has consecutive tokens of a text. Enqueue the launch in every step that reads the text, in order.
    """
    size = local_size(device, 64)
    constants = {"HIDDEN": hidden, "POOLING": POOLINGS.index(pooling), "ROW": row, "LOCAL_SIZE": size}
    groups = (-(-hidden // size),)
    arguments = [step.state, x, rows]
    (launch,) = op_launches(device, "pool", constants | step.constants, arguments, groups=groups, local=(size,))
    return launch

"""last_token: makes the last token of a step the only token."""

from __future__ import annotations

from llmcl.kernels.common import step_state
from llmcl.kernels.common.cost import once
from llmcl.kernels.common.sizes import local_size
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def last_token(device: Device, step: StepState, x: Buffer, qkv: Buffer, *, hidden: int, columns: int) -> list[Launch]:
    """Moves the last rows of x float32 [n, hidden] and qkv float32 [n, columns] to row 0, and sets the state
    accordingly.

    Later launches see a step with a single token at the last token's position.
    """
    size = local_size(device, 256)
    return op_launches(
        device,
        "last_token",
        {**step_state.CONSTANTS, "HIDDEN": hidden, "QKV": columns, "LOCAL_SIZE": size},
        [step.state, x, qkv],
        groups=(1,),
        local=(size,),
        cost=once(8 * (hidden + columns)),
    )


def last_row(device: Device, step: StepState, x: Buffer, columns: int) -> list[Launch]:
    """Moves the last row of x float32 [n, columns] to row 0. Must be enqueued before `last_token`, which changes n."""
    size = local_size(device, 256)
    return op_launches(
        device,
        "last_row",
        {**step_state.CONSTANTS, "COLUMNS": columns, "LOCAL_SIZE": size},
        [step.state, x],
        groups=(1,),
        local=(size,),
        cost=once(8 * columns),
    )

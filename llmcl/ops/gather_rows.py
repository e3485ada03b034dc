"""gather_rows: the rows of a ragged step that are wanted further, such as those whose logits are."""

from __future__ import annotations

from llmcl.kernels.common.cost import once
from llmcl.kernels.common.ragged_step import WANTED, RaggedStep
from llmcl.kernels.common.sizes import local_size
from llmcl.runtime.device import Buffer, Device, Launch


def gather_rows(device: Device, step: RaggedStep, x: Buffer, out: Buffer, columns: int) -> list[Launch]:
    """out float32 [m, columns] = the wanted rows of x float32 [n, columns]; columns: a multiple of 4."""
    size = local_size(device, 256)
    return [
        device.launch(
            "portable/gather_rows.cl",
            "gather_rows",
            {"COLUMNS": columns, "LOCAL_SIZE": size, "WANTED": f"state[{WANTED}]"},
            [step.state, x, out],
            groups=lambda n: (step.n_wanted,),
            local=(size,),
            cost=once(8 * columns),
        )
    ]

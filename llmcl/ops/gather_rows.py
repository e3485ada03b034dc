"""gather_rows: gathers a ragged step's rows that later kernels need, for example rows with wanted logits."""

from __future__ import annotations

from llmcl.kernels.common.cost import once
from llmcl.kernels.common.ragged_step import WANTED, RaggedStep
from llmcl.kernels.common.sizes import local_size
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def gather_rows(device: Device, step: RaggedStep, x: Buffer, out: Buffer, columns: int) -> list[Launch]:
    """Copies the wanted rows of x float32 [n, columns] to out float32 [m, columns]; columns: a multiple of 4."""
    size = local_size(device, 256)
    return op_launches(
        device,
        "gather_rows",
        {"COLUMNS": columns, "LOCAL_SIZE": size, "WANTED": f"state[{WANTED}]"},
        [step.state, x, out],
        groups=lambda n: (step.n_wanted,),
        local=(size,),
        cost=once(8 * columns),
    )

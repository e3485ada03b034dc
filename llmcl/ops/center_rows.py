"""center_rows: subtracts the mean of each row, for layer norms."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import local_size
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def center_rows(device: Device, x: Buffer, columns: int) -> list[Launch]:
    """Computes x[t] -= mean(x[t]) in place. x float32 [n, columns], columns a multiple of 16."""
    size = local_size(device, 64)
    return op_launches(
        device,
        "center_rows",
        {"COLUMNS": columns, "LOCAL_SIZE": size},
        [x],
        groups=lambda n: (n,),
        local=(size,),
        cost=per_token(8 * columns),
    )

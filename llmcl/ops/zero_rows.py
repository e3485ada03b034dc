"""zero_rows: clears rows where sums begin, for sums outside the residual stream."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import local_size, run_of
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def zero_rows(device: Device, x: Buffer, columns: int) -> list[Launch]:
    """Computes x[t] = 0; x float32 [n, columns], columns a multiple of 16."""
    size = local_size(device, 64)
    run = run_of(device, columns // 16, size)
    return op_launches(
        device,
        "zero_rows",
        {"COLUMNS": columns, "RUN": run, "LOCAL_SIZE": size},
        [x],
        groups=lambda n: (-(-columns // (16 * run)), n),
        local=(size, 1),
        cost=per_token(4 * columns),
    )

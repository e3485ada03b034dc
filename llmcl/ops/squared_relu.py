"""squared_relu: the activation of MLPs and experts without a gate."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import local_size, run_of
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def squared_relu(device: Device, x: Buffer, columns: int) -> list[Launch]:
    """Computes x[t] = max(x[t], 0)^2 in place. x float32 [n, columns], columns a multiple of 16."""
    size = local_size(device, 64)
    run = run_of(device, columns // 16, size)
    return op_launches(
        device,
        "squared_relu",
        {"COLUMNS": columns, "RUN": run, "LOCAL_SIZE": size},
        [x],
        groups=lambda n: (-(-columns // (16 * run)), n),
        local=(size, 1),
        cost=per_token(8 * columns),
    )

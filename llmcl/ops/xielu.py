"""xielu: the activation of an MLP without a gate."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import local_size, run_of
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def xielu(device: Device, x: Buffer, curve: Buffer, columns: int) -> list[Launch]:
    """Applies xIELU to x float32 [n, columns] in place, columns a multiple of 16.

    curve float32 [4]: alpha_p, alpha_n - beta, beta, eps.
    """
    size = local_size(device, 64)
    run = run_of(device, columns // 16, size)
    return op_launches(
        device,
        "xielu",
        {"COLUMNS": columns, "RUN": run, "LOCAL_SIZE": size},
        [x, curve],
        groups=lambda n: (-(-columns // (16 * run)), n),
        local=(size, 1),
        cost=per_token(8 * columns),
    )

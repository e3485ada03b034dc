"""add_bias: adds a projection's bias after the product was added to the residual stream."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import local_size, run_of
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def add_bias(device: Device, x: Buffer, bias: Buffer) -> list[Launch]:
    """Computes x[t] += bias in place.

    x float32 [n, columns], bias float32 [columns], columns a multiple of 16.
    """
    columns = bias.nbytes // 4
    size = local_size(device, 64)
    run = run_of(device, columns // 16, size)
    return op_launches(
        device,
        "add_bias",
        {"COLUMNS": columns, "RUN": run, "LOCAL_SIZE": size},
        [x, bias],
        groups=lambda n: (-(-columns // (16 * run)), n),
        local=(size, 1),
        cost=per_token(8 * columns),
    )

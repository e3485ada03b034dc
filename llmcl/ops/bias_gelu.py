"""bias_gelu: adds a projection's bias and applies gelu."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import local_size
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def bias_gelu(device: Device, x: Buffer, bias: Buffer, *, tanh: bool) -> list[Launch]:
    """Computes x[t] = gelu(x[t] + bias) in place; x float32 [n, columns], bias float32 [columns].

    tanh: with the tanh approximation of gelu.
    """
    size, columns = local_size(device, 64), bias.nbytes // 4
    return op_launches(
        device,
        "bias_gelu",
        {"COLUMNS": columns, "TANH": int(tanh), "LOCAL_SIZE": size},
        [x, bias],
        groups=lambda n: (-(-columns // size), n),
        local=(size, 1),
        cost=per_token(8 * columns),
    )

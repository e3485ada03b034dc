"""layer_norm: normalises every token of a step to mean 0 and variance 1, with weights and bias."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import local_size
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def layer_norm(
    device: Device, x: Buffer, weight: Buffer, bias: Buffer, eps: float, out: Buffer | None = None
) -> list[Launch]:
    """Normalises x into out (None: in place), both float32 [n, hidden].

    weight and bias float32 [hidden], hidden a multiple of 16.
    """
    size, hidden = local_size(device, 64), weight.nbytes // 4
    return op_launches(
        device,
        "layer_norm",
        {"HIDDEN": hidden, "EPS": float(eps), "LOCAL_SIZE": size},
        [x, weight, bias, out or x],
        groups=lambda n: (n,),
        local=(size,),
        cost=per_token(2 * weight.nbytes),
    )

"""rms_norm: normalises every token of a step. In decode, a norm before a product is part of the product."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import local_size
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def rms_norm(
    device: Device,
    x: Buffer,
    weight: Buffer,
    out: Buffer,
    eps: float,
    *,
    add: bool = False,
    row: int | None = None,
    first: int = 0,
) -> list[Launch]:
    """Normalises x into out, both float32 [n, hidden], possibly the same buffer; weight float32 [hidden].

    add: out += the normalised x. row: values per token in x and out, normalised from `first` on; None: hidden.
    """
    size, hidden = local_size(device, 64), weight.nbytes // 4
    constants = {"HIDDEN": hidden, "ROW": row or hidden, "FIRST": first, "EPS": float(eps), "ADD": add}
    return op_launches(
        device,
        "rms_norm",
        {**constants, "LOCAL_SIZE": size},
        [x, weight, out],
        groups=lambda n: (n,),
        local=(size,),
        cost=per_token((3 if add else 2) * weight.nbytes),
    )

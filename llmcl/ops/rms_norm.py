"""rms_norm: the normalisation of every token of a step (in decode that before a product is part of the product)."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import local_size
from llmcl.runtime.device import Buffer, Device, Launch


def rms_norm(device: Device, x: Buffer, weight: Buffer, out: Buffer, eps: float, *, add: bool = False) -> list[Launch]:
    """x, out float32 [n, hidden]; weight float32 [hidden]. add: out += the normalised x."""
    size = local_size(device, 64)
    return [
        device.launch(
            "portable/rms_norm.cl",
            "rms_norm",
            {"HIDDEN": weight.nbytes // 4, "EPS": float(eps), "ADD": add, "LOCAL_SIZE": size},
            [x, weight, out],
            groups=lambda n: (n,),
            local=(size,),
            cost=per_token((3 if add else 2) * weight.nbytes),
        )
    ]

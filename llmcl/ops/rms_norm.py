"""rms_norm: the normalisation of every token of a step (in decode that before a product is part of the product)."""

from __future__ import annotations

from llmcl.kernels.common import step_state
from llmcl.kernels.common.dtype import KERNEL_NAMES
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.work import per_token
from llmcl.kernels.variant import local_size
from llmcl.ops.narrow import NarrowRows
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
            work=per_token((3 if add else 2) * weight.nbytes),
        )
    ]


def rms_norm_narrow(
    device: Device, x: Buffer, weight: Buffer, out: NarrowRows, eps: float, step: StepState
) -> list[Launch]:
    """The same with the result rounded for a product on Hopper's matrix units. x float32 [n, hidden]."""
    constants = {**step_state.CONSTANTS, "OUT": KERNEL_NAMES[out.dtype], "HIDDEN": out.k, "EPS": float(eps)}
    return [
        device.launch(
            "nvidia/rms_norm_blocks.cl",
            "rms_norm",
            constants,
            [x, weight, out.buffer, step.state],
            groups=lambda n: (-(-n // 8),),
            local=(256,),
            work=per_token(6.0 * out.k),
        )
    ]

"""Activations in the form that products on matrix units take, where a kernel can leave them so for the next."""

from __future__ import annotations

from dataclasses import dataclass

from llmcl.kernels.common import step_state
from llmcl.kernels.common.dtype import KERNEL_NAMES
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.work import per_token
from llmcl.runtime.device import Buffer, Device, Launch


@dataclass(frozen=True)
class NarrowRows:
    """A step's activations of k columns for Hopper's matrix units: `dtype` (16 bits) [ceil(n/8), k/8, 8, 8].

    The buffer has rows for a multiple of 128 tokens; those past the step's may hold anything.
    """

    buffer: Buffer
    dtype: str
    k: int


def narrow_rows(device: Device, x: Buffer, k: int, dtype: str, step: StepState, *, blocks: bool) -> list[Launch]:
    """Rounds x float32 [n, k] to `dtype` in `step.narrowed_rows(k)`: as NarrowRows, or without `blocks` [n, k]."""
    constants = {**step_state.CONSTANTS, "WEIGHT": KERNEL_NAMES[dtype], "K": k, "BLOCKS": blocks, "LOCAL_SIZE": 128}
    return [
        device.launch(
            "nvidia/narrow_rows.cl",
            "narrow_rows",
            constants,
            [x, step.narrowed_rows(k), step.state],
            groups=(lambda n: (-(-k // 128), -(-n // 8))) if blocks else (lambda n: (-(-k // 1024), n)),
            local=(128, 1),
            work=per_token(6.0 * k),
        )
    ]

"""rope_table: rotations of a step's tokens, for layers with other frequencies than `embed` gets."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import local_size
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def rope_table(device: Device, step: StepState, rotation: Buffer, rope: Buffer) -> list[Launch]:
    """Writes rope float32 [n, head_dim] (cosines, sines). rotation float32 [2, head_dim / 2]: see
    `ModelConfig.rotations`.
    """
    size = local_size(device, 64)
    return op_launches(
        device,
        "rope_table",
        {**step.constants, "HEAD_DIM": rotation.nbytes // 4, "LOCAL_SIZE": size},
        [step.state, rotation, rope],
        groups=lambda n: (n,),
        local=(size,),
        cost=per_token(rotation.nbytes),
    )

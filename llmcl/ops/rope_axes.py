"""rope_axes: rotations of tokens that have a position on each of several axes."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import local_size
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def rope_axes(
    device: Device, positions: Buffer, axes: Buffer, rotation: Buffer, rope: Buffer, *, n_axes: int
) -> list[Launch]:
    """Writes rope float32 [n, head_dim] (cosines, sines). positions int32 [n, n_axes], axes int32 [head_dim / 2]: whose
    position rotates each pair, rotation float32 [2, head_dim / 2]: see `ModelConfig.rotations`.
    """
    size = local_size(device, 64)
    return op_launches(
        device,
        "rope_axes",
        {"HEAD_DIM": rotation.nbytes // 4, "N_AXES": n_axes, "LOCAL_SIZE": size},
        [positions, axes, rotation, rope],
        groups=lambda n: (n,),
        local=(size,),
        cost=per_token(rotation.nbytes + 4 * n_axes),
    )

"""embed: token ids -> embedding rows and rotations."""

from __future__ import annotations

import numpy as np

from llmcl.architectures.config import RopeScaling
from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.dtype import TILE_ROWS, kernel_name, tile_bytes
from llmcl.kernels.common.sizes import local_size
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def embed(
    device: Device,
    table: Weight,
    step: StepState,
    rotation: Buffer,
    x: Buffer,
    rope: Buffer,
    last_seen: Buffer,
    *,
    scale: float = 1.0,
    by_length: RopeScaling | None = None,
) -> list[Launch]:
    """Writes x float32 [n, hidden] and rope float32 [n, head_dim] (cosines, sines), and updates last_seen.

    last_seen int32 [vocab], or [n_sequences, vocab] with several sequences. rotation float32 [2, head_dim / 2]: see
    `ModelConfig.rotations`. scale: factor for the embedding rows. by_length: see `ModelConfig.rope_by_length`; rotation
    then has a third row.

    Needs one launch per buffer in the table; each launch writes the rows in its buffer.
    """
    constants: dict[str, object] = {
        **step.constants,
        "HEAD_DIM": rotation.nbytes // (4 if by_length is None else 6),
        "LOCAL_SIZE": local_size(device, 256),
    }
    if by_length is not None and by_length.kind == "longrope":
        constants["ROPE_LONG"] = 1
    elif by_length is not None:
        original = by_length.original_max_position
        constants |= {"ROPE_GROWTH": f"{by_length.factor / original!r}f", "ROPE_ORIGINAL": original}
    launches = []
    for part in table.parts:
        first, rows = table.rows_in(part)
        launches += op_launches(
            device,
            "embed",
            constants | {"WEIGHT": kernel_name(part.dtype)},
            [
                part.buffer,
                step.tokens,
                step.state,
                rotation,
                x,
                rope,
                last_seen,
                np.int32(first),
                np.int32(rows),
                np.int32(table.k),
                np.float32(scale),
                np.int32(table.rows),
            ],
            groups=lambda n: (n,),
            local=(local_size(device, 256),),
            cost=per_token(4 * table.k + tile_bytes(table.k, part.dtype) / TILE_ROWS),
        )
    return launches

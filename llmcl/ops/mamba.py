"""mamba_inputs and mamba_mixer: a layer's Mamba-2 mixer, between its projections."""

from __future__ import annotations

from dataclasses import dataclass

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import columns_a_work_item, local_size
from llmcl.kernels.common.step_state import RECURRENT, StepState
from llmcl.kernels.table import op_launches
from llmcl.ops.delta_rule import delta_rule, gated_norm
from llmcl.ops.delta_shape import MambaShape
from llmcl.ops.short_conv import conv_state
from llmcl.runtime.device import Buffer, Device, Launch

CPU_RUN = 32  # pieces of 16 channels per work-group on a CPU, as in short_conv
LARGEST_FLOAT = 3.4e38


@dataclass(frozen=True)
class MambaBuffers:
    """Buffers for a Mamba-2 mixer."""

    conv: Buffer  # float32 [length, channels], with a bias one row more
    scalars: Buffer  # float32 [3, n_heads]: A, the bias of the time steps, D
    norm: Buffer  # float32 [inner]
    inputs: Buffer  # convolution state, float32 [slots, length - 1, channels]
    matrix: Buffer  # matrix state, float32 [slots, n_heads, d_state, d_head]
    rows: Buffer  # the projection's output for a step of n tokens, float32 [n, shape.row]
    xbc: Buffer  # scratch, float32 [n, channels]
    gates: Buffer  # scratch, float32 [n, n_heads, 2]
    out: Buffer  # float32 [n, inner]


def mamba_inputs(
    device: Device,
    shape: MambaShape,
    rows: Buffer,
    weights: Buffer,
    scalars: Buffer,
    step: StepState,
    states: Buffer,
    xbc: Buffer,
    gates: Buffer,
    *,
    each_alone: bool,
) -> list[Launch]:
    """Prepares x, B and C for the scan, and each head's decay and time step. Operands: see `MambaBuffers`.

    states: the convolution's. each_alone: see short_conv.
    """
    assert each_alone or not step.n_sequences  # see short_conv
    width, size = columns_a_work_item(device), local_size(device, 64)
    run = CPU_RUN if device.is_cpu else size
    constants = {**step.constants, **shape.scan.constants, "STATE_RECURRENT": RECURRENT, "LENGTH": shape.length}
    constants |= {"RUN": run, "LOCAL_SIZE": size, "WIDTH": width, "CONV_BIAS": shape.conv_bias}
    constants |= {"LEAST_STEP": shape.least_step, "MOST_STEP": min(shape.most_step, LARGEST_FLOAT)}
    moved = 2 + (2 * (shape.length - 1) if each_alone else 0)
    launches = op_launches(
        device,
        "mamba_inputs",
        {**constants, "EACH_ALONE": each_alone},
        [rows, weights, scalars, step.state, states, xbc, gates],
        groups=lambda n: (-(-shape.channels // (run * width)), n),
        local=(size, 1),
        cost=per_token(4 * (moved * shape.channels + 3 * shape.n_heads)),
    )
    if not each_alone:
        sizes = {"row": shape.row, "channels": shape.channels, "length": shape.length}
        launches += conv_state(device, rows, step, states, **sizes, gated=False)
    return launches


def mamba_mixer(
    device: Device, shape: MambaShape, buffers: MambaBuffers, step: StepState, *, eps: float, each_alone: bool
) -> list[Launch]:
    """Computes the gated norm of the scan's output for a step's rows, and updates states. each_alone: see
    short_conv.
    """
    rows, scan, scalars = buffers.rows, (buffers.xbc, buffers.gates), buffers.scalars
    inputs = rows, buffers.conv, scalars, step, buffers.inputs, *scan
    return [
        *mamba_inputs(device, shape, *inputs, each_alone=each_alone),
        *delta_rule(
            device, shape.scan, *scan, step, buffers.matrix, buffers.out, each_alone=each_alone, scalars=scalars
        ),
        *gated_norm(device, shape, buffers.out, buffers.norm, rows, eps),
    ]

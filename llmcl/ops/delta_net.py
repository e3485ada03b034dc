"""delta_net: a gated delta net between its projections, in the launches that suit the device and the step."""

from __future__ import annotations

from dataclasses import dataclass

from llmcl.kernels.common.step_state import StepState
from llmcl.ops.delta_rule import delta_inputs, delta_rule, gated_norm
from llmcl.ops.delta_shape import DeltaShape
from llmcl.ops.delta_token import delta_token
from llmcl.runtime.device import Buffer, Device, Launch


@dataclass(frozen=True)
class DeltaBuffers:
    """Buffers for a gated delta net."""

    conv: Buffer  # float32 [length, channels]
    scalars: Buffer  # float32 [2, n_v]: A and the bias of the decays
    norm: Buffer  # float32 [d_v]
    inputs: Buffer  # convolution state, float32 [slots, length - 1, channels]
    matrix: Buffer  # matrix state, float32 [slots, n_v, d_k, d_v]
    rows: Buffer  # the projection's output for a step of n tokens, float32 [n, shape.row]
    qkv: Buffer  # scratch, float32 [n, channels]
    gates: Buffer  # scratch, float32 [n, n_v, 2]
    out: Buffer  # float32 [n, n_v, d_v]


def delta_net(
    device: Device, shape: DeltaShape, of: DeltaBuffers, step: StepState, *, eps: float, each_alone: bool
) -> list[Launch]:
    """Computes the gated norm of the delta rule's output for a step's rows, and updates states. each_alone: see
    short_conv.
    """
    if each_alone and not device.is_cpu:  # on a GPU, separate launches take longer than their work
        operands = of.rows, of.conv, of.scalars, of.norm
        return delta_token(device, shape, *operands, step, of.inputs, of.matrix, of.out, eps=eps)
    rows = of.rows, of.conv, of.scalars
    return [
        *delta_inputs(device, shape, *rows, step, of.inputs, of.qkv, of.gates, each_alone=each_alone),
        *delta_rule(device, shape, of.qkv, of.gates, step, of.matrix, of.out, each_alone=each_alone),
        *gated_norm(device, shape, of.out, of.norm, of.rows, eps),
    ]

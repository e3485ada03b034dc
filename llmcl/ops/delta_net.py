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
    """Of a layer: conv float32 [length, channels], scalars float32 [2, n_v]: A and the bias of the decays, norm float32
    [d_v]; inputs float32 [slots, length - 1, channels] and matrix float32 [slots, n_v, d_k, d_v]: its states.

    Of a step of n tokens: rows float32 [n, shape.row] of its projection; qkv float32 [n, channels] and gates float32
    [n, n_v, 2]: working memory; out float32 [n, n_v, d_v].
    """

    conv: Buffer
    scalars: Buffer
    norm: Buffer
    inputs: Buffer
    matrix: Buffer
    rows: Buffer
    qkv: Buffer
    gates: Buffer
    out: Buffer


def delta_net(
    device: Device, shape: DeltaShape, of: DeltaBuffers, step: StepState, *, eps: float, each_alone: bool
) -> list[Launch]:
    """out = gated norm of the delta rule of a step's rows; and the new states. each_alone: as in short_conv."""
    if each_alone and not device.is_cpu:  # whose launches take longer than what they compute
        given = of.rows, of.conv, of.scalars, of.norm
        return delta_token(device, shape, *given, step, of.inputs, of.matrix, of.out, eps=eps)
    rows = of.rows, of.conv, of.scalars
    return [
        *delta_inputs(device, shape, *rows, step, of.inputs, of.qkv, of.gates, each_alone=each_alone),
        *delta_rule(device, shape, of.qkv, of.gates, step, of.matrix, of.out, each_alone=each_alone),
        *gated_norm(device, shape, of.out, of.norm, of.rows, eps),
    ]

"""delta_token: a token per sequence through a gated delta net, between its projections, in one launch on a GPU."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import largest_divisor
from llmcl.kernels.common.step_state import RECURRENT, StepState
from llmcl.kernels.table import op_launches
from llmcl.ops.delta_shape import DeltaShape
from llmcl.runtime.device import Buffer, Device, Launch

ITEMS = 1024  # work-items per group, at most


def delta_token(
    device: Device,
    shape: DeltaShape,
    rows: Buffer,
    weights: Buffer,
    scalars: Buffer,
    norm: Buffer,
    step: StepState,
    inputs: Buffer,
    states: Buffer,
    out: Buffer,
    *,
    eps: float,
) -> list[Launch]:
    """Computes the result of delta_inputs, delta_rule and gated_norm if each row is a sequence's only token.

    rows, weights, scalars: see delta_inputs. inputs: the states of delta_inputs. states: the states of delta_rule. norm
    float32 [d_v]: the weight of gated_norm. out float32 [n, n_v, d_v].
    """
    parts = 8 if shape.d_k > 128 else 4
    columns = shape.n_v // shape.n_k * shape.d_v
    size = parts * largest_divisor(columns, min(ITEMS, device.entry.max_work_group_size) // parts)
    constants = {**step.constants, **shape.constants, "STATE_RECURRENT": RECURRENT, "LENGTH": shape.length}
    token_constants = {"PARTS": parts, "LOCAL_SIZE": size, "EPS": float(eps), "HEADS_IN_TURN": shape.heads_in_turn}
    return op_launches(
        device,
        "delta_token",
        {**constants, **token_constants},
        [rows, weights, scalars, norm, step.state, inputs, states, out],
        groups=lambda n: (shape.n_k, n),
        local=(size, 1),
        cost=per_token(shape.token_bytes),
    )

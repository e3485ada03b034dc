"""delta_inputs, delta_rule and gated_norm: a layer's gated delta net, between its projections."""

from __future__ import annotations

import numpy as np

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import columns_a_work_item, largest_divisor, local_size
from llmcl.kernels.common.step_state import RECURRENT, SNAPSHOT, StepState
from llmcl.kernels.table import op_launches
from llmcl.ops.delta_chunks import chunk_sizes, delta_chunks
from llmcl.ops.delta_shape import DeltaShape, MambaShape
from llmcl.ops.short_conv import conv_state
from llmcl.runtime.device import Buffer, Cost, Device, Launch

SOFTWARE_SEGMENT = 128  # tokens per launch on a software renderer, which stops long loops (`Device.is_cpu`)
MOST_TOKENS = 1 << 24  # tokens per launch elsewhere
COLUMNS, PARTS = 32, 4  # of a head's state, per work-group if a work-item has one column; see delta_rule.cl
HEADS_A_GROUP = 8  # on a CPU
MOST_COLUMNS = 512  # of a head that 32 work-items normalise


def delta_inputs(
    device: Device,
    shape: DeltaShape,
    rows: Buffer,
    weights: Buffer,
    scalars: Buffer,
    step: StepState,
    states: Buffer,
    qkv: Buffer,
    gates: Buffer,
    *,
    each_alone: bool,
) -> list[Launch]:
    """Prepares queries, keys and values for the delta rule, and each value head's decay and rate.

    rows float32 [n, shape.row]; weights float32 [length, channels]; scalars float32 [2, n_v]: A and the bias of the
    decays; states float32 [slots, length - 1, channels]; qkv float32 [n, channels]; gates float32 [n, n_v, 2].
    each_alone: see short_conv.
    """
    assert each_alone or not step.n_sequences  # see short_conv
    heads = 2 * shape.n_k + shape.n_v
    per_group = largest_divisor(heads, HEADS_A_GROUP) if device.is_cpu else 1
    group = {"HEADS_PER_GROUP": per_group, "WIDTH": columns_a_work_item(device), "LOCAL_SIZE": local_size(device, 64)}
    constants = {**step.constants, "STATE_RECURRENT": RECURRENT, **shape.constants, **group, "LENGTH": shape.length}
    moved = 2 + (2 * (shape.length - 1) if each_alone else 0)
    launches = op_launches(
        device,
        "delta_inputs",
        {**constants, "EACH_ALONE": each_alone},
        [rows, weights, scalars, step.state, states, qkv, gates],
        groups=lambda n: (heads // per_group, n),
        local=(group["LOCAL_SIZE"], 1),
        cost=per_token(4 * (moved * shape.channels + 4 * shape.n_v)),
    )
    if not each_alone:
        sizes = {"row": shape.row, "channels": shape.channels, "length": shape.length}
        launches += conv_state(device, rows, step, states, **sizes, gated=False)
    return launches


def delta_rule(
    device: Device,
    shape: DeltaShape,
    qkv: Buffer,
    gates: Buffer,
    step: StepState,
    states: Buffer,
    out: Buffer,
    *,
    each_alone: bool,
    scalars: Buffer | None = None,
) -> list[Launch]:
    """Computes out[t] = S^T q for each value head, after S = decay S, S += k (rate (v - S^T k))^T.

    qkv and gates come from `delta_inputs`; states float32 [slots, n_v, d_k, d_v]; out float32 [n, n_v, d_v].

    Mamba-2's scan, if `shape` corrects nothing: qkv, gates and scalars as in `mamba_inputs`.
    """
    if not each_alone and (chunks := chunk_sizes(device, shape)) is not None:
        return delta_chunks(device, shape, chunks, qkv, gates, step, states, out, scalars)
    width = columns_a_work_item(device)
    columns, parts = (1, 1) if device.is_cpu else (largest_divisor(shape.d_v, COLUMNS), PARTS)
    columns_of_group = columns * width
    segment = SOFTWARE_SEGMENT if device.entry.is_software else MOST_TOKENS
    sizes = {"COLUMNS": columns, "PARTS": parts, "WIDTH": width, "SEGMENT": segment}
    kind = {"HEADS_IN_TURN": shape.heads_in_turn, "EACH_ALONE": each_alone, "STATE_RECURRENT": RECURRENT}
    kind |= {"STATE_SNAPSHOT": SNAPSHOT, "CORRECTS": shape.corrects}
    assert shape.corrects == (scalars is None)
    others = [] if scalars is None else [scalars]
    state_values = shape.n_v * shape.d_k * shape.d_v

    def groups(n: int) -> tuple[int, ...]:
        return (shape.d_v // columns_of_group, shape.n_v, *((n,) if each_alone else ()))

    def cost(n: int, position: int) -> Cost:
        tokens = 4 * n * (shape.channels + shape.n_v * (shape.d_v + 2))
        return Cost(8 * state_values * (n if each_alone else 1) + tokens, 8.0 * state_values * n)

    launches: list[Launch] = []
    for first in range(0, 1 if each_alone else step.max_tokens, segment):
        launches += op_launches(
            device,
            "delta_rule",
            {**step.constants, **shape.constants, **sizes, **kind},
            [qkv, gates, step.state, states, out, np.int32(first), *others],
            groups=groups,
            local=(columns * parts, *((1, 1) if each_alone else (1,))),
            cost=cost,
        )
    return launches


def gated_norm(
    device: Device, shape: DeltaShape | MambaShape, x: Buffer, weight: Buffer, rows: Buffer, eps: float
) -> list[Launch]:
    """Computes x = rms_norm(x) silu(gate) for each value head, in place; for Mamba-2 x = rms_norm(x silu(gate)) for
    each group of heads.

    x float32 [n, n_v, d_v]; weight float32 [d_v], for Mamba-2 of all heads; rows as in `delta_inputs` or
    `mamba_inputs`, including the gates.
    """
    sizes = shape.norm_constants
    heads, columns = sizes["HEADS"], sizes["COLUMNS"]
    size = local_size(device, 32 if columns <= MOST_COLUMNS else 256)
    per_group = largest_divisor(heads, HEADS_A_GROUP) if device.is_cpu else 1
    constants: dict[str, object] = {
        **sizes,
        "EPS": float(eps),
        "HEADS_PER_GROUP": per_group,
        "LOCAL_SIZE": size,
        "WIDTH": columns_a_work_item(device),
    }
    return op_launches(
        device,
        "gated_norm",
        constants,
        [x, weight, rows],
        groups=lambda n: (heads // per_group, n),
        local=(size, 1),
        cost=per_token(12 * heads * columns),
    )

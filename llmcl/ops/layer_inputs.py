"""layer_inputs and gate_inputs: per-layer embeddings, and the gate that lets a layer read them."""

from __future__ import annotations

import math

import numpy as np

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.dtype import TILE_ROWS, kernel_name, tile_bytes
from llmcl.kernels.common.linear import EXPERT_GATES
from llmcl.kernels.common.sizes import local_size, run_of
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def layer_inputs(
    device: Device, table: Weight, norm: Buffer, step: StepState, x: Buffer, *, n_layers: int, eps: float
) -> list[Launch]:
    """Computes x[t][l] = (rms_norm(x[t][l]) + sqrt(size) table[tokens[t]][l]) / sqrt(2) in place.

    x float32 [n, n_layers, size], norm float32 [size], table [vocab, n_layers size]; size a multiple of 16.

    Needs one launch per buffer in the table; each launch handles the tokens with rows in its buffer.
    """
    columns = table.k // n_layers
    size = local_size(device, 64)
    constants: dict[str, object] = {
        **step.constants,
        "N_LAYERS": n_layers,
        "SIZE": columns,
        "EPS": float(eps),
        "X_SCALE": math.sqrt(columns),
        "FACTOR": math.sqrt(0.5),
        "LOCAL_SIZE": size,
    }
    launches = []
    for part in table.parts:
        first, rows = table.rows_in(part)
        launches += op_launches(
            device,
            "layer_inputs",
            constants | {"WEIGHT": kernel_name(part.dtype)},
            [part.buffer, step.tokens, step.state, norm, x, np.int32(first), np.int32(rows)],
            groups=lambda n: (n_layers, n),
            local=(size, 1),
            cost=per_token(8 * table.k + tile_bytes(table.k, part.dtype) / TILE_ROWS),
        )
    return launches


def gate_inputs(
    device: Device, gate: Buffer, x: Buffer, kind: str, *, columns: int, row: int, first: int
) -> list[Launch]:
    """Computes gate[t] = act(gate[t]) x[t] in place.

    gate float32 [n, columns], x float32 [n, row], read from column `first` on; all multiples of 16. kind: "swiglu" or
    "geglu", selects act.
    """
    size = local_size(device, 64)
    run = run_of(device, columns // 16, size)
    return op_launches(
        device,
        "gate_inputs",
        {
            "COLUMNS": columns,
            "ROW": row,
            "FIRST": first,
            "GATE": EXPERT_GATES[kind],
            "RUN": run,
            "LOCAL_SIZE": size,
        },
        [gate, x],
        groups=lambda n: (-(-columns // (16 * run)), n),
        local=(size, 1),
        cost=per_token(12 * columns),
    )

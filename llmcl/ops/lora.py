"""lora: adds the products of LoRA adapters to a product's result, for the adapters chosen by each row's sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.dtype import ITEM_BYTES, TILE_ROWS, kernel_name
from llmcl.kernels.common.linear import EPILOGUES, GATES
from llmcl.kernels.common.sizes import local_size
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch

ROWS_AT_ONCE = 4  # rows of A; every rank is a multiple
_DOWN_RUN, _UP_RUN = 2, 4  # units that a CPU's work-group takes


@dataclass(frozen=True)
class LowRankWeight:
    """The adapters of one weight on the device. Layouts: kernels/portable/lora.cl."""

    a: Buffer
    b: Buffer
    owners: Buffer
    segments: Buffer
    table: Buffer
    dtype: str
    k: int
    columns: int
    total: int  # rows of A
    n_adapters: int


def lora(
    device: Device,
    weight: LowRankWeight,
    x: Buffer,
    out: Buffer,
    scales: Buffer,
    step: StepState,
    *,
    norm: Buffer | None = None,
    eps: float = 0.0,
    base: Buffer | None = None,
    epilogue: str = "add",
) -> list[Launch]:
    """Computes out[t] += sum over adapters of scale B A rms_norm(x[t]) for every token t; without `norm`, of x[t].

    x float32 [n, k]; norm float32 [k]; out float32 [n, columns], columns a multiple of 16; scales float32 [sequences,
    adapters], 0 for adapters that a sequence has not chosen. epilogue "swiglu" or "geglu": base float32 [n, columns]
    has alternating gate and up tiles, and out float32 [n, columns / 2] is gate(gate) up, after the addition.
    """
    assert weight.columns % TILE_ROWS == 0 and weight.k % 16 == 0
    low = step.scratch(f"low rank rows, {weight.total} columns", 4 * step.max_tokens * weight.total)
    size, (down_run, run) = local_size(device, 64), (_DOWN_RUN, _UP_RUN) if device.is_cpu else (1, 1)
    constants = {
        **step.constants,
        "WEIGHT": kernel_name(weight.dtype),
        "NORM": norm is not None,
        "EPS": float(eps) if norm is not None else 0.0,
        "LOCAL_SIZE": size,
    }
    gate = {"GATE": GATES[epilogue]} if epilogue in GATES else {}
    n_blocks = -(-weight.total // (ROWS_AT_ONCE * down_run))
    n_units = -(-weight.columns // ((2 * TILE_ROWS if gate else TILE_ROWS) * run * size))
    item = ITEM_BYTES[weight.dtype]
    down = op_launches(
        device,
        "lora",
        constants | {"EPILOGUE": EPILOGUES["add"]},
        [weight.a, x, x if norm is None else norm, low, weight.owners, scales, step.state]
        + [np.int32(value) for value in (weight.k, weight.total, weight.n_adapters, down_run)],
        groups=lambda n: (n_blocks, n),
        local=(size, 1),
        stage="down",
        cost=per_token(item * weight.total * weight.k),
    )
    up = op_launches(
        device,
        "lora",
        constants | gate | {"EPILOGUE": EPILOGUES[epilogue], "NORM": False, "EPS": 0.0},
        [weight.b, low, out if base is None else base, out, weight.segments, weight.table, scales, step.state]
        + [np.int32(value) for value in (weight.columns, weight.total, weight.n_adapters, run)],
        groups=lambda n: (n_units, n),
        local=(size, 1),
        stage="up",
        cost=per_token(item * weight.b.nbytes // ITEM_BYTES[weight.dtype]),
    )
    return [*down, *up]

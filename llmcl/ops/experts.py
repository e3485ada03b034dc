"""Expert products.

For few tokens, experts_gate_up and experts_down handle tokens one by one. For many tokens there are group_by_expert,
experts_prefill (for both products), and experts_sum.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from llmcl.kernels import implementation, table
from llmcl.kernels.common import step_state
from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.dtype import ITEM_BYTES, KERNEL_NAMES, TILE_ROWS, kernel_name
from llmcl.kernels.common.experts import (
    BLOCK_ROWS,
    ExpertProduct,
    ExpertRows,
    ExpertsDown,
    ExpertsFewRows,
    ExpertsGateUp,
    ExpertsOfRows,
    ExpertsPrefill,
    bias_constants,
    block_count,
)
from llmcl.kernels.common.linear import EXPERT_GATES, FEW_ROWS
from llmcl.kernels.common.sizes import local_size, run_of
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight
from llmcl.kernels.table import op_launches
from llmcl.ops.squared_relu import squared_relu
from llmcl.runtime.device import Buffer, Device, KernelArg, Launch


def experts_gate_up(
    device: Device,
    weight: Weight,
    x: Buffer,
    ids: Buffer,
    out: Buffer,
    *,
    gate: str,
    norm: Buffer | None = None,
    eps: float = 0.0,
    bias: Buffer | None = None,
) -> list[Launch]:
    """Computes out[t][s] = gate(W_gate y) (W_up y) with expert ids[t][s], where y = rms_norm(x[t]), or x[t] without
    `norm`.

    bias float32 [n_experts, 2, f]: added to W_gate y and to W_up y.

    weight [n_experts 2 f, k], with alternating gate and up tiles; x float32 [n, k]; norm float32 [k]; ids int32
    [n, top_k]; out float32 [n, top_k, f]; k and f multiples of 16. gate: a key of EXPERT_GATES. With "relu2", weight is
    W_up [n_experts f, k] alone, and out = max(W_up y, 0)^2, without a bias.
    """
    launches = []
    for part in weight.parts:
        product = ExpertProduct(weight, part, tiles_of(gate), is_first=True)
        row = table.pick(ExpertsGateUp, device, part.dtype, weight.k)
        size_constants, groups, local = row.size(device, product)
        constants = {
            **product.constants(),
            "GATE": EXPERT_GATES[gate],
            "NORM": norm is not None,
            "EPS": float(eps),
            **size_constants,
        }
        constants |= bias_constants(bias)
        args: list[KernelArg] = [part.buffer, x, x if norm is None else norm, ids, out, np.int32(product.first_expert)]
        args += [] if bias is None else [bias]
        cost = product.cost(weight.k + weight.top_k * product.tiles * 8)
        launches.append(
            device.launch(row.file, "experts_gate_up", constants, args, groups=groups, local=local, cost=cost)
        )
    return launches


def tiles_of(gate: str | None) -> int:
    """Returns the tiles that belong together: a gate's and an up projection's, or one."""
    return 1 if gate in (None, "relu2") else 2


def experts_down(
    device: Device,
    weight: Weight,
    rows: Buffer,
    ids: Buffer,
    weights: Buffer,
    out: Buffer,
    *,
    bias: Buffer | None = None,
) -> list[Launch]:
    """Computes out[t] += sum_s weights[t][s] (W rows[t][s] + bias) with expert ids[t][s].

    bias float32 [n_experts, hidden].

    weight [n_experts hidden, f]; rows float32 [n, top_k, f]; ids int32 [n, top_k]; weights float32 [n, top_k]; out
    float32 [n, hidden]; f and hidden multiples of 16.
    """
    launches = []
    for part in weight.parts:
        product = ExpertProduct(weight, part, tiles_at_once=1)
        row = table.pick(ExpertsDown, device, part.dtype, weight.k)
        size_constants, groups, local = row.size(device, product)
        constants = product.constants() | dict(size_constants) | bias_constants(bias)
        args: list[KernelArg] = [part.buffer, rows, ids, weights, out, np.int32(product.first_expert)]
        args += [] if bias is None else [bias]
        cost = product.cost(weight.top_k * weight.k + 2 * product.tiles * 16)
        launches.append(device.launch(row.file, "experts_down", constants, args, groups=groups, local=local, cost=cost))
    return launches


def group_by_expert(
    device: Device,
    ids: Buffer,
    order: Buffer,
    blocks: Buffer,
    step: StepState,
    *,
    n_experts: int,
    top_k: int,
    block_rows: int,
) -> list[Launch]:
    """Sorts a step's slots t top_k + s by expert, and makes blocks of slots with the same expert.

    ids int32 [n, top_k]; order int32 [n top_k]; blocks int32 [`block_count`, 4]: expert, first index in order, slot
    count, and in the first block the total number of blocks. block_rows: maximum slots per block (see `block_rows`).
    """
    size = local_size(device, 1024)
    constants = {"N_EXPERTS": n_experts, "TOP_K": top_k, "BLOCK_ROWS": block_rows, "LOCAL_SIZE": size}
    return op_launches(
        device,
        "group_by_expert",
        {**step_state.CONSTANTS, **constants},
        [ids, order, blocks, step.state],
        groups=(1,),
        local=(size,),
        cost=per_token(12 * top_k),
    )


def _of_rows(device: Device, weight: Weight, max_rows: int) -> list[ExpertsOfRows]:
    """Picks a kernel for each part. All kernels must take blocks of the same size."""
    few: list[ExpertsOfRows] = [*table.implementations(ExpertsFewRows)] if 0 < max_rows <= FEW_ROWS[-1] else []
    many = table.implementations(ExpertsPrefill)
    usual = [row for row in many if row.block_rows == BLOCK_ROWS]
    for kinds in ([*few, *many], [*many]):
        rows = [implementation.pick(kinds, device, part.dtype, weight.k) for part in weight.parts]
        if len({row.block_rows for row in rows}) == 1:
            return rows
    return [implementation.pick(usual, device, part.dtype, weight.k) for part in weight.parts]


def has_few_rows(device: Device, weight: Weight, max_rows: int, *, in_chains: bool = False) -> bool:
    """Tells whether experts_prefill has a special kernel for steps with few tokens.

    in_chains: the kernel must also support fused launches.
    """
    rows = _of_rows(device, weight, max_rows)
    return all(isinstance(row, ExpertsFewRows) and (row.in_chains(device) or not in_chains) for row in rows)


def suits_single_slots(device: Device, weight: Weight) -> bool:
    """Tells whether experts_prefill is faster even if most experts have a single token."""
    rows = zip(_of_rows(device, weight, 0), weight.parts, strict=True)
    return all(row.suits_single_slots(device, weight, part.dtype) for row, part in rows)


def block_rows(device: Device, weight: Weight, max_rows: int = 0) -> int:
    """Returns experts_prefill's block size in slots for this weight."""
    return _of_rows(device, weight, max_rows)[0].block_rows


def gated_rows(device: Device, gate_up: Weight, down: Weight, step: StepState, max_rows: int = 0) -> ExpertRows | None:
    """Returns rows that experts_prefill may fill with gate_up's results and then read for `down`, without a copy.

    None: the rows are float32.
    """
    row_kinds = {
        row.rows(device, down, part.dtype, step)
        for row, part in zip(_of_rows(device, down, max_rows), down.parts, strict=True)
    }
    rows = row_kinds.pop()
    makers = _of_rows(device, gate_up, max_rows)
    fits = rows is not None and not row_kinds and all(row.leaves(rows.dtype) for row in makers)
    return rows if fits else None


def slot_outputs(device: Device, down: Weight, outputs: Buffer, max_rows: int = 0) -> Buffer | ExpertRows:
    """Returns `outputs` in the dtype that experts_prefill writes fastest for this weight, as input for experts_sum."""
    rows = zip(_of_rows(device, down, max_rows), down.parts, strict=True)
    dtypes = {row.output_dtype(part.dtype) for row, part in rows}
    return outputs if dtypes == {"float32"} or len(dtypes) > 1 else ExpertRows(outputs, dtypes.pop())


def experts_prefill(
    device: Device,
    weight: Weight,
    x: Buffer | ExpertRows,
    order: Buffer,
    blocks: Buffer,
    out: Buffer | ExpertRows,
    step: StepState,
    *,
    gate: str | None = None,
    weights: Buffer | None = None,
    bias: Buffer | None = None,
    max_rows: int = 0,
) -> list[Launch]:
    """Multiplies each token t of a step by its experts s, in the order left by group_by_expert.

    With a gate (a key of EXPERT_GATES): out[t][s] as in experts_gate_up without a norm; x float32 [n, k], out
    [n, top_k, f].
    The gate "relu2" also needs weights, which are ones, and an `out` in float32.
    With weights float32 [n, top_k]: out[t][s] = weights[t][s] W x[t][s]; x float32 [n, top_k, f], out
    [n, top_k, hidden].

    bias: as in the ops for few tokens. ExpertRows: from `gated_rows`. max_rows: maximum tokens per step if few
    (`has_few_rows`); 0: any number. All ops of a step must get the same max_rows.
    """
    launches: list[Launch] = []
    for part, row in zip(weight.parts, _of_rows(device, weight, max_rows), strict=True):
        product = ExpertProduct(weight, part, tiles_of(gate), is_first=gate is not None)
        size_constants, groups, local = row.size(device, product)
        if isinstance(x, ExpertRows):
            rows = x.buffer
        else:
            rows, packing = row.pack(device, product, x, order, blocks, step)
            launches += packing
        constants = {**product.constants(), "EXPERT_TILES": product.tiles, **size_constants}
        constants |= {"SLOTS": product.slots, **bias_constants(bias)}
        constants["EPILOGUE"] = "EPILOGUE_STORE" if product.tiles_at_once == 1 else "EPILOGUE_SWIGLU"
        constants |= {} if gate is None else {"GATE": EXPERT_GATES[gate]}
        constants |= {"OUT": kernel_name(out.dtype)} if isinstance(out, ExpertRows) else {}
        assert weights is not None or product.tiles_at_once == 2
        factors = order if weights is None else weights  # not read with gate and up tiles
        out_buffer = out.buffer if isinstance(out, ExpertRows) else out
        args: list[KernelArg] = [part.buffer, rows, order, blocks, factors, out_buffer, np.int32(product.first_expert)]
        args += [] if bias is None else [bias]
        values = weight.top_k * (weight.k + product.units * TILE_ROWS)
        launches.append(
            device.launch(
                row.kernel_file(device, product),
                row.kernel,
                constants,
                args,
                groups=groups,
                local=local,
                cost=product.cost(values),
            )
        )
    if gate == "relu2":
        assert isinstance(out, Buffer)
        launches += squared_relu(device, out, weight.top_k * weight.rows // weight.n_experts)
    return launches


def experts_sum(device: Device, y: Buffer | ExpertRows, x: Buffer, *, top_k: int, columns: int) -> list[Launch]:
    """Computes x[t] += sum_s y[t][s].

    x float32 [n, columns], y [n, top_k, columns], columns a multiple of 16. y: float32, or from `slot_outputs`.
    """
    outputs, dtype = (y.buffer, y.dtype) if isinstance(y, ExpertRows) else (y, "float32")
    size = local_size(device, 64)
    run = run_of(device, columns // 16, size)
    return op_launches(
        device,
        "experts_sum",
        {"COLUMNS": columns, "TOP_K": top_k, "RUN": run, "LOCAL_SIZE": size, "OUTPUTS": KERNEL_NAMES[dtype]},
        [outputs, x],
        groups=lambda n: (-(-columns // (16 * run)), n),
        local=(size, 1),
        cost=per_token(columns * (ITEM_BYTES[dtype] * top_k + 8)),
    )


def experts_scratch_bytes(
    device: Device,
    matrices: Iterable[tuple[str, int, int, int]],
    max_tokens: int,
    *,
    exact_activations: bool,
) -> int:
    """Returns the total scratch bytes of experts_prefill, for experts given as (dtype, k, n_experts, top_k)."""
    scratch: dict[str, int] = {}
    for dtype, k, n_experts, top_k in set(matrices):
        row = table.pick(ExpertsPrefill, device, dtype, k)
        n_blocks = block_count(max_tokens, n_experts, top_k)
        for name, nbytes in row.scratch(device, dtype, k, exact_activations, n_blocks).items():
            scratch[name] = max(nbytes, scratch.get(name, 0))
    return sum(scratch.values())

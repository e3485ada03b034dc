"""experts_gate_up and experts_down: the products of a mixture of experts, with those that a token goes to."""

from __future__ import annotations

import numpy as np

from llmcl.kernels import table
from llmcl.kernels.common.experts import ExpertProduct, ExpertsDown, ExpertsGateUp
from llmcl.kernels.common.linear import GATES
from llmcl.kernels.common.weight import Weight
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
) -> list[Launch]:
    """out[t][s] = gate(W_gate y) (W_up y) of expert ids[t][s], with y = rms_norm(x[t]), or x[t] without `norm`.

    weight [n_experts 2 f, k] of experts, their tiles of gate and up in turn; x float32 [n, k]; norm float32 [k]; ids
    int32 [n, top_k]; out float32 [n, top_k, f]; k and f multiples of 16. gate: "swiglu" or "geglu".
    """
    launches = []
    for part in weight.parts:
        product = ExpertProduct(weight, part, tiles_at_once=2)
        row = table.pick(ExpertsGateUp, device, part.dtype, weight.k)
        own, groups, local = row.size(device, product)
        constants = {**product.constants(), "GATE": GATES[gate], "NORM": norm is not None, "EPS": float(eps), **own}
        args: list[KernelArg] = [part.buffer, x, x if norm is None else norm, ids, out, np.int32(product.first_expert)]
        cost = product.cost(weight.k + weight.top_k * product.tiles * 8)
        launches.append(
            device.launch(row.file, "experts_gate_up", constants, args, groups=groups, local=local, cost=cost)
        )
    return launches


def experts_down(
    device: Device, weight: Weight, rows: Buffer, ids: Buffer, weights: Buffer, out: Buffer
) -> list[Launch]:
    """out[t] += sum_s weights[t][s] W rows[t][s] of expert ids[t][s].

    weight [n_experts hidden, f] of experts; rows float32 [n, top_k, f]; ids int32 [n, top_k]; weights float32
    [n, top_k]; out float32 [n, hidden]; f and hidden multiples of 16.
    """
    launches = []
    for part in weight.parts:
        product = ExpertProduct(weight, part, tiles_at_once=1)
        row = table.pick(ExpertsDown, device, part.dtype, weight.k)
        own, groups, local = row.size(device, product)
        args: list[KernelArg] = [part.buffer, rows, ids, weights, out, np.int32(product.first_expert)]
        cost = product.cost(weight.top_k * weight.k + 2 * product.tiles * 16)
        launches.append(
            device.launch(
                row.file, "experts_down", product.constants() | dict(own), args, groups=groups, local=local, cost=cost
            )
        )
    return launches

"""biased_gate: the gate of an MLP with biases in its projections, because no product's epilogue adds biases."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.linear import GATES
from llmcl.kernels.common.sizes import local_size, run_of
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def biased_gate(device: Device, gate_up: Buffer, bias: Buffer, out: Buffer, gate: str) -> list[Launch]:
    """Computes out[t] = gate(gate[t] + bias[0]) (up[t] + bias[1]).

    gate_up float32 [n, 2 f], with alternating gate and up tiles of 16, as left by the product; bias float32 [2, f]; out
    float32 [n, f]; f a multiple of 16. gate: "swiglu" or "geglu".
    """
    columns = bias.nbytes // 8
    size = local_size(device, 64)
    run = run_of(device, columns // 16, size)
    return op_launches(
        device,
        "biased_gate",
        {"COLUMNS": columns, "GATE": GATES[gate], "RUN": run, "LOCAL_SIZE": size},
        [gate_up, bias, out],
        groups=lambda n: (-(-columns // (16 * run)), n),
        local=(size, 1),
        cost=per_token(12 * columns),
    )

"""sigmoid_gate: gates the output of attention or a shared expert, as in some models."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import columns_a_work_item, local_size
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch

CPU_RUN = 64  # pieces of 16 values per work-group on a CPU


def sigmoid_gate(device: Device, x: Buffer, gate: Buffer, *, columns: int, gate_row: int | None = None) -> list[Launch]:
    """Computes x[t] *= sigmoid(gate[t]); x, gate float32 [n, columns], columns a multiple of 16.

    With gate_row, gate is float32 [n, gate_row], and the last value of a row is the gate for all of x[t].
    """
    width, size = columns_a_work_item(device), local_size(device, 64)
    run = CPU_RUN if device.is_cpu else size
    return op_launches(
        device,
        "sigmoid_gate",
        {
            "COLUMNS": columns,
            "GATE_ROW": gate_row or columns,
            "ONE_A_ROW": gate_row is not None,
            "RUN": run,
            "LOCAL_SIZE": size,
            "WIDTH": width,
        },
        [x, gate],
        groups=lambda n: (-(-columns // (run * width)), n),
        local=(size, 1),
        cost=per_token(12 * columns),
    )

"""scale_rows: scales a layer's output by a factor, as some models do."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import local_size, run_of
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def scale_rows(device: Device, x: Buffer, factor: Buffer, columns: int, *, per_row: bool = False) -> list[Launch]:
    """Computes x[t] *= factor[0] in place. per_row: x[t] *= factor[t].

    x float32 [n, columns], columns a multiple of 16; factor float32 [1], or [n].
    """
    size = local_size(device, 64)
    run = run_of(device, columns // 16, size)
    return op_launches(
        device,
        "scale_rows",
        {"COLUMNS": columns, "RUN": run, "LOCAL_SIZE": size, **({"PER_ROW": True} if per_row else {})},
        [x, factor],
        groups=lambda n: (-(-columns // (16 * run)), n),
        local=(size, 1),
        cost=per_token(8 * columns),
    )

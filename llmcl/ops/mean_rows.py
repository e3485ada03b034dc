"""mean_rows: averages consecutive rows, for the pooling of an image's patches."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import local_size
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def mean_rows(device: Device, x: Buffer, out: Buffer, *, n_rows: int, columns: int) -> list[Launch]:
    """Computes out[t] as the mean of rows n_rows t to n_rows (t + 1) - 1 of x.

    x float32 [n_rows n, columns], out float32 [n, columns], columns a multiple of 16. n_rows: at least 1.
    """
    size = local_size(device, 64)
    return op_launches(
        device,
        "mean_rows",
        {"N_ROWS": n_rows, "COLUMNS": columns, "LOCAL_SIZE": size},
        [x, out],
        groups=lambda n: (-(-columns // (16 * size)), n),
        local=(size, 1),
        cost=per_token(4 * (n_rows + 1) * columns),
    )

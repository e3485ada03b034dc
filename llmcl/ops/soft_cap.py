"""soft_cap: keeps logits between -cap and cap."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import local_size, run_of
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch

_LONG_RUN = 128


def soft_cap(device: Device, x: Buffer, row: int, cap: float | None) -> list[Launch]:
    """Computes x = cap tanh(x / cap) in place, x float32 [n, row]. Returns no launch if cap is None."""
    if cap is None:
        return []
    size = local_size(device, 64)
    run = run_of(device, _LONG_RUN, size)
    return op_launches(
        device,
        "soft_cap",
        {"N": row, "CAP": float(cap), "RUN": run, "LOCAL_SIZE": size},
        [x],
        groups=lambda n: (-(-row // (8 * run)), n),
        local=(size, 1),
        cost=per_token(8 * row),
    )

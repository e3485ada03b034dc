"""scale_shares: scales each expert's output by a factor, as some models do."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import local_size, power_of_two_at_least
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def scale_shares(device: Device, shares: Buffer, ids: Buffer, scales: Buffer, *, top_k: int) -> list[Launch]:
    """Computes shares[t][s] *= scales[ids[t][s]] in place.

    shares float32 [n, top_k], ids int32 [n, top_k], scales float32 [n_experts].
    """
    size = local_size(device, min(64, power_of_two_at_least(top_k)))
    return op_launches(
        device,
        "scale_shares",
        {"TOP_K": top_k, "LOCAL_SIZE": size},
        [shares, ids, scales],
        groups=lambda n: (n,),
        local=(size,),
        cost=per_token(16 * top_k),
    )

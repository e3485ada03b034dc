"""random_weight: random numbers in place of a checkpoint's, for models that are only timed."""

from __future__ import annotations

import numpy as np

from llmcl.kernels.common.dtype import QUANTIZED, TILE_ROWS, kernel_name
from llmcl.kernels.common.sizes import local_size
from llmcl.kernels.common.weight import Weight
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Device


def random_weight(device: Device, weight: Weight, spread: float, seed: int) -> None:
    """Fills a weight on the device with random values around 0, variance spread^2 / 3: uniform in [-spread, spread), or
    random quants.

    Padding rows are filled as well; no kernel stores their results.
    """
    for part in weight.parts:
        width = local_size(device, 64)
        values = part.n_tiles * TILE_ROWS * weight.k
        count = values // (32 * TILE_ROWS) if part.dtype in QUANTIZED else values
        (launch,) = op_launches(
            device,
            "random_weight",
            {"WEIGHT": kernel_name(part.dtype)},
            [part.buffer, np.uint64(count), np.int32(weight.k), np.float32(spread), np.uint32(seed + part.first_tile)],
            groups=(device.compute_units * 64,),
            local=(width,),
        )
        launch.enqueue()

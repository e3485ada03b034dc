"""Device addresses for kernels with more buffers than a kernel can have arguments."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from llmcl.runtime.device import Buffer, Device, KernelArg


def addresses_of(device: Device, buffers: Iterable[Buffer]) -> dict[int, int]:
    """Returns the device address of each buffer by the buffer's id().

    The caller must keep the buffers alive: the driver does not know that a kernel uses an address.
    """
    distinct = list({id(buffer): buffer for buffer in buffers}.values())
    table = device.alloc(8 * len(distinct), "addresses of buffers")
    for i, buffer in enumerate(distinct):
        args: list[KernelArg] = [table, np.int32(i), buffer]
        launch = device.launch("common/store_address.cl", "store_address", {}, args, groups=(1,), local=(1,))
        launch.share_kernel().enqueue()
    addresses = device.read(table, np.int64, (len(distinct),))
    table.release()
    return dict(zip(map(id, distinct), addresses.tolist(), strict=True))

"""Tests whether a device takes Hopper features: asynchronous matrix products (wgmma) and copies by the copy engine
(tensor maps). Hopper's OpenCL compiler refuses both (ptx_splice.py).

Run as a program by `ask`, the module reports whether a small product or copy is right on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.probe import answer_parent, is_right

PROBES = {"wgmma": "nvidia/wgmma_probe.cl", "tensor_map": "nvidia/tensor_map_probe.cl"}


@cache
def has_wgmma(entry: DeviceEntry) -> bool:
    """Tells whether kernels with `wgmma` compile and compute correctly on the device; only Hopper (sm_90) has wgmma."""
    return _takes("wgmma", entry)


@cache
def has_tensor_maps(entry: DeviceEntry) -> bool:
    """Tells whether kernels with tensor maps compile and copy correctly here: CUDA 12.3 drivers or later."""
    return _takes("tensor_map", entry)


def _takes(what: str, entry: DeviceEntry) -> bool:
    from llmcl.runtime.program import read_source

    if entry.fact("ptx_arch") != 90:
        return False
    return is_right(what, __name__, entry, what, source=read_source(PROBES[what]))


def _probe(entry: DeviceEntry, arguments: Sequence[str]) -> str | None:
    return _probe_product(entry) if arguments == ["wgmma"] else _probe_copy(entry)


def _probe_product(entry: DeviceEntry) -> str | None:
    """Compares a product with NumPy's. Operands are small whole numbers, so the product is exact."""
    import numpy as np

    from llmcl.reference import to_tiles
    from llmcl.runtime.device import Device

    device = Device.open(entry)
    rng = np.random.default_rng(1)
    a = rng.integers(-8, 9, (64, 32)).astype(np.float16)
    b = rng.integers(-8, 9, (64, 32)).astype(np.float16)
    # [warp, row half, lane / 4, step, column half, lane % 4, pair] -> a lane's 8 values per step (nvidia/ptx.cl)
    fragments = np.ascontiguousarray(a.reshape(4, 2, 8, 2, 2, 4, 2).transpose(3, 0, 2, 5, 4, 1, 6))
    out = device.zeros(4 * 64 * 64, "product")
    arguments = [device.upload(fragments, "a"), device.upload(to_tiles(b), "b"), out]
    device.launch(PROBES["wgmma"], "wgmma_probe", {}, arguments, groups=(1,), local=(128,)).enqueue()
    product = device.read(out, np.float32, (64, 64))
    return None if np.array_equal(product, a.astype(np.float32) @ b.astype(np.float32).T) else "the product is wrong"


def _probe_copy(entry: DeviceEntry) -> str | None:
    """Compares a box that reaches past the array's end with NumPy's."""
    import numpy as np

    from llmcl.runtime.device import Device

    device = Device.open(entry)
    a = np.random.default_rng(1).integers(1, 1000, (2, 3, 20, 128)).astype(np.float16)
    out = device.zeros(2 * 64 * 64, "box")
    arguments = [device.upload(a, "a"), device.zeros(128, "map"), out]
    device.launch(PROBES["tensor_map"], "tensor_map_probe", {}, arguments, groups=(1,), local=(32,)).enqueue()
    copied = device.read(out, np.float16, (64, 8, 8))
    rows = np.arange(64)[:, None]
    expected = np.zeros((64, 64), np.float16)
    expected[:16] = a[1, 2, 4:, 64:]
    box = copied[rows, np.arange(8) ^ rows % 8].reshape(64, 64)
    return None if np.array_equal(box, expected) else "the box is wrong"


if __name__ == "__main__":
    answer_parent(_probe)

"""Whether a device takes Hopper's asynchronous matrix products: its OpenCL compiler refuses them (ptx_splice.py).

Run as a program by `ask`, it says whether one such product is right on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.probe import LASTS_S, YES, answer_parent, ask, remembered

PROBE = "nvidia/wgmma_probe.cl"


@cache
def has_wgmma(entry: DeviceEntry) -> bool:
    """Whether kernels with `wgmma` compile on the device and compute correctly; only Hopper (sm_90) has it."""
    from llmcl.runtime.program import read_source

    if entry.ptx_arch != 90:
        return False

    def answer() -> tuple[str, float]:
        verdict = ask(__name__, entry).verdict
        return verdict, LASTS_S[verdict]

    return remembered("wgmma", entry, read_source(PROBE), answer=answer) == YES


def _probe(entry: DeviceEntry, _: Sequence[str]) -> str | None:
    """Compares a product of small whole numbers, which is exact, with NumPy's."""
    import numpy as np

    from llmcl.reference import to_tiles
    from llmcl.runtime.device import Device

    device = Device.open(entry)
    rng = np.random.default_rng(1)
    a = rng.integers(-8, 9, (64, 32)).astype(np.float16)
    b = rng.integers(-8, 9, (64, 32)).astype(np.float16)
    # [warp, row half, lane / 4, step, column half, lane % 4, pair] -> a lane's 8 values of each step (nvidia/ptx.cl)
    fragments = np.ascontiguousarray(a.reshape(4, 2, 8, 2, 2, 4, 2).transpose(3, 0, 2, 5, 4, 1, 6))
    out = device.zeros(4 * 64 * 64, "product")
    device.launch(
        PROBE,
        "wgmma_probe",
        {},
        [device.upload(fragments, "a"), device.upload(to_tiles(b), "b"), out],
        groups=(1,),
        local=(128,),
    ).enqueue()
    product = device.read(out, np.float32, (64, 64))
    return None if np.array_equal(product, a.astype(np.float32) @ b.astype(np.float32).T) else "the product is wrong"


if __name__ == "__main__":
    answer_parent(_probe)

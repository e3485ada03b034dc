"""Which variant of a kernel a device gets: one row each, the first whose condition holds is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmcl.errors import DeviceError, UsageError
from llmcl.runtime.device import Device


@dataclass(frozen=True)
class Variant:
    """A kernel file for a class of devices. The portable variant comes last and suits every device and operand.

    fits: whether it can take a storage type and a size: the columns of a product, the dimensions of a head.
    """

    name: str
    file: str
    suits: Callable[[Device], bool]
    fits: Callable[[str, int], bool] = lambda dtype, size: True

    def key(self, dtype: str) -> str:
        """The name of this variant for a storage type among a device's findings."""
        return f"{self.file} {dtype}"


PTX_VARIANTS = ("nvidia", "hopper")  # made of inline PTX, which others refuse; matrix units round their operands


def variants(
    kernel: str, nvidia: Callable[[str, int], bool], hopper: Callable[[str, int], bool] | None = None
) -> tuple[Variant, ...]:
    """The variants of a kernel that has one for each class of devices.

    nvidia, hopper: what the variants for NVIDIA GPUs and for those with `wgmma` fit; None where there is none.
    """
    return (
        # Asynchronous matrix products of four warps, whose operands come from local memory.
        *((Variant("hopper", f"nvidia/{kernel}_wgmma.cl", lambda device: device.has_wgmma, hopper),) if hopper else ()),
        # Matrix units, asynchronous copies and 16-bit conversions, in inline PTX.
        Variant("nvidia", f"nvidia/{kernel}.cl", lambda device: device.entry.ptx_arch >= 80, nvidia),
        # Software renderers (llvmpipe) would take half a minute to compile a kernel of wide vectors.
        Variant("cpu", f"cpu/{kernel}.cl", lambda device: device.is_cpu),
        Variant("portable", f"portable/{kernel}.cl", lambda device: True),
    )


def pick(table: Sequence[Variant], device: Device, dtype: str, size: int, name: str | None = None) -> Variant:
    """The variant called `name`, whatever the device, or without a name the first that suits device and operand.

    What `llmcl doctor` found to be wrong on the device is left out. Raises UsageError for a name that the table lacks
    or that cannot take `dtype` and `size`, DeviceError where every variant is wrong.
    """
    wrong = device.findings.wrong
    for variant in table:
        if variant.name == name and not variant.fits(dtype, size):
            raise UsageError(f"kernel variant {name!r} does not take {dtype} of size {size}; leave the choice to llmcl")
        if variant.name == name:
            return variant
        if name is None and variant.suits(device) and variant.fits(dtype, size) and variant.key(dtype) not in wrong:
            return variant
    if name is None:
        raise wrong_kernel_error(device, table[-1].key(dtype))
    raise UsageError(f"no kernel variant is called {name!r}; there are {', '.join(v.name for v in table)}")


def check_shared_kernels(device: Device, *dtypes: str) -> None:
    """Raises DeviceError where `llmcl doctor` found a kernel to be wrong that has no variants."""
    for key in device.findings.wrong:
        file, _, dtype = key.partition(" ")
        if "/" not in file and dtype in dtypes:
            raise wrong_kernel_error(device, key)


def wrong_kernel_error(device: Device, key: str) -> DeviceError:
    file, _, dtype = key.partition(" ")
    return DeviceError(
        f"kernel {file} gives wrong results for {dtype} on {device.name} with this driver, and no other variant is "
        f"left: {device.findings.wrong.get(key, 'unknown')}; use another --device, --dtype or --kv-dtype, or update "
        "the driver (`llmcl doctor` checks again, `llmcl doctor --reset` forgets)"
    )


def power_of_two_at_most(limit: int) -> int:
    return 1 << (max(1, limit).bit_length() - 1)


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most limit."""
    return next(d for d in range(min(n, max(1, limit)), 0, -1) if n % d == 0)


def local_size(device: Device, wanted: int) -> int:
    """Work-items of a group for kernels that scale with any power of two: one on a CPU, whose vectors do the rest."""
    return 1 if device.is_cpu else power_of_two_at_most(min(wanted, device.entry.max_work_group_size))

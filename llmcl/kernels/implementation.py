"""Implementations of an op on the device classes, and the choice for a given device."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from llmcl.errors import DeviceError, UsageError, shown
from llmcl.runtime.device import Device, Groups, KernelArg

Size = tuple[Mapping[str, object], Groups, tuple[int, ...]]
"""Build constants, the work-groups, and the work-items per group."""


class Implementation(ABC):
    """A way to run an op: a kernel file, the supported devices and operands, and the launches.

    name: the variant name for users and tests. Implementations of an op may share a name if they take different dtypes.
    file: the kernel file, relative to `kernels/`.
    """

    name: str
    file: str

    def supports_device(self, device: Device) -> bool:
        """Tells whether the device can run the kernel. By default any device can."""
        return True

    def supports(self, dtype: str, size: int) -> bool:
        """Tells whether the kernel supports a storage type and a size: a product's columns, or a head's dimensions."""
        return True

    rounds_to_16_bits = False
    """Matrix units round float32 operands, so results differ by more than the order of sums."""

    runs_anywhere = True
    """Every OpenCL compiler takes the kernel, though only some devices would choose it."""

    arguments: Sequence[str] = ()
    """Sizes passed as the kernel's last arguments, in this order, instead of build constants: calls that differ only in
    these sizes share a program.
    """

    def with_arguments(self, constants: Mapping[str, object]) -> tuple[dict[str, object], list[KernelArg]]:
        """Returns the build constants without `arguments`, and the kernel arguments."""
        rest, args = dict(constants), list[KernelArg]()
        for name in self.arguments:
            value = rest.pop(name)
            assert isinstance(value, (int, float))
            args.append(np.float32(value) if isinstance(value, float) else np.int32(value))
        return rest, args

    def key(self, dtype: str) -> str:
        """Returns the implementation's key in a device's cache for a storage type."""
        return f"{self.file} {dtype}"


class OpKernel(Implementation):
    """Runs an op without an abstract class: by default `portable/<op>.cl`, on any device.

    A device class derives a subclass with a folder, a name and `supports_device`, and lists an instance per op. All
    kernels for an op take the same arguments.
    """

    name = "shared"
    folder = "portable"

    def __init__(self, op: str):
        self.op = op
        self.file = f"{self.folder}/{op}.cl"

    def size(self, device: Device, portable: Size) -> Size:
        """Returns the kernel's sizes. portable: the portable kernel's sizes."""
        return portable


Row = TypeVar("Row", bound=Implementation)


def pick(rows: Sequence[Row], device: Device, dtype: str, size: int, name: str | None = None) -> Row:
    """Returns the first of `rows` that supports the device and operand. With `name`, ignores the device and goes by
    name.

    Leaves out kernels that `llmcl doctor` found to be wrong on the device. Raises UsageError for an unknown name, or if
    the named variant does not take `dtype` and `size`. Raises DeviceError if every row is wrong.
    """
    wrong = device.cache.excluded
    if name is not None:
        named = [row for row in rows if row.name == name]
        for row in named:
            if row.supports(dtype, size):
                return row
        if named:
            raise UsageError(f"kernel variant {name!r} does not take {dtype} of size {size}; leave the choice to llmcl")
        there = ", ".join(dict.fromkeys(row.name for row in rows))
        raise UsageError(f"no kernel variant is called {shown(name)}; there are {there}")
    fitting = [row for row in rows if row.supports_device(device) and row.supports(dtype, size)]
    for row in fitting:
        if row.key(dtype) not in wrong:
            return row
    raise wrong_kernel_error(device, fitting[-1].key(dtype))


def wrong_kernel_error(device: Device, key: str) -> DeviceError:
    """Returns the error for a wrong kernel without an alternative."""
    file, _, dtype = key.partition(" ")
    return DeviceError(
        f"kernel {file} gives wrong results for {dtype} on {device.name} with this driver, and no other variant is "
        f"left: {device.cache.excluded.get(key, 'unknown')}; use another --device, --dtype or --kv-dtype, or update "
        "the driver (`llmcl doctor` checks again, `llmcl doctor --reset` forgets)"
    )

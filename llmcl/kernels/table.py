"""The device classes: a row per folder, the preferred folder first."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from llmcl.errors import UsageError, shown
from llmcl.kernels import cpu, intel, nvidia, portable
from llmcl.kernels import implementation as base
from llmcl.kernels.implementation import OpKernel, Row
from llmcl.runtime.device import CostModel, Device, Groups, KernelArg, Launch

CLASSES = (nvidia, cpu, intel, portable)  # the last one supports every device
CHECKED_OPS = ("embed", "rms_norm", "sample")  # with an OpKernel, checked by `llmcl doctor`, needed by every model
ROWS: tuple[base.Implementation, ...] = tuple(row for folder in CLASSES for row in folder.IMPLEMENTATIONS)


def only_portable() -> bool:
    """Tells whether the user restricts llmcl to portable variants with LLMCL_VARIANT=portable.

    Raises UsageError for another value.
    """
    value = os.environ.get("LLMCL_VARIANT", "")
    if value not in ("", "portable"):
        raise UsageError(f"LLMCL_VARIANT is {shown(value)}; expected portable; unset it to leave the choice to llmcl")
    return value == "portable"


def implementations(kind: type[Row]) -> tuple[Row, ...]:
    """Returns the implementations of an op, such as `LinearDecode`, in order of preference."""
    return _of_kind(kind, only_portable())


@cache  # a loading model asks about a hundred times
def _of_kind(kind: type[base.Implementation], of_portable: bool) -> tuple[Any, ...]:
    return tuple(row for row in (portable.IMPLEMENTATIONS if of_portable else ROWS) if isinstance(row, kind))


def pick(kind: type[Row], device: Device, dtype: str, size: int, name: str | None = None) -> Row:
    """Picks an op's implementation for the device, a storage type and a size (see `implementation.pick`)."""
    return base.pick(implementations(kind), device, dtype, size, name)


def op_kernels(op: str) -> tuple[OpKernel, ...]:
    """Returns an op's OpKernels in order of preference. The portable kernel is last."""
    return (*(row for row in implementations(OpKernel) if row.op == op), OpKernel(op))


def op_kernel(device: Device, op: str) -> OpKernel:
    """Picks the OpKernel for the device. Skips wrong kernels if a right one is left."""
    wrong = {key.partition(" ")[0] for key in device.cache.excluded}
    rows = [row for row in op_kernels(op) if row.supports_device(device)]
    return next((row for row in rows if row.file not in wrong), rows[-1])


def op_launches(
    device: Device,
    op: str,
    constants: Mapping[str, object],
    args: Sequence[KernelArg],
    *,
    groups: Groups,
    local: tuple[int, ...],
    stage: str = "",
    cost: CostModel | None = None,
) -> list[Launch]:
    """Binds the OpKernel for the device. constants, groups and local are the portable kernel's.

    stage: the entry `<op>_<stage>` of a file with several entries.
    """
    row = op_kernel(device, op)
    constants, groups, local = row.size(device, (constants, groups, local))
    name = f"{op}_{stage}" if stage else op
    return [device.launch(row.file, name, dict(constants), args, groups=groups, local=local, cost=cost)]


def check_only_kernels(device: Device, *dtypes: str, others: Sequence[str] = ()) -> None:
    """Raises DeviceError if `llmcl doctor` found no right kernel for an op. others: ops beyond CHECKED_OPS."""
    for op in (*CHECKED_OPS, *others):
        for dtype in dtypes:
            if (key := op_kernel(device, op).key(dtype)) in device.cache.excluded:
                raise base.wrong_kernel_error(device, key)

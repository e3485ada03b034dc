"""The device classes: a row per folder, the preferred folder first."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from llmcl.errors import UsageError, shown
from llmcl.kernels import cpu, intel, nvidia, portable
from llmcl.kernels import implementation as base
from llmcl.kernels.implementation import Row
from llmcl.runtime.device import Device

CLASSES = (nvidia, cpu, intel, portable)  # the last one supports every device
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

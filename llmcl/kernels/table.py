"""The device classes: a row a folder, the preferred first."""

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
    """Whether the user keeps the choice to the portable variants: LLMCL_VARIANT=portable.

    Raises UsageError for another value.
    """
    value = os.environ.get("LLMCL_VARIANT", "")
    if value not in ("", "portable"):
        raise UsageError(f"LLMCL_VARIANT is {shown(value)}; expected portable; unset it to leave the choice to llmcl")
    return value == "portable"


def implementations(kind: type[Row]) -> tuple[Row, ...]:
    """The implementations of an op, such as `LinearDecode`, in the order in which they are preferred."""
    return _of_kind(kind, only_portable())


@cache  # of a hundred questions that a model asks as it is loaded
def _of_kind(kind: type[base.Implementation], of_portable: bool) -> tuple[Any, ...]:
    return tuple(row for row in (portable.IMPLEMENTATIONS if of_portable else ROWS) if isinstance(row, kind))


def pick(kind: type[Row], device: Device, dtype: str, size: int, name: str | None = None) -> Row:
    """The implementation of an op that a device gets for a storage type and a size: `implementation.pick`."""
    return base.pick(implementations(kind), device, dtype, size, name)

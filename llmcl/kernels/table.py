"""The device classes: a row a folder, the preferred first."""

from __future__ import annotations

from llmcl.kernels import cpu, nvidia, portable
from llmcl.kernels import implementation as base
from llmcl.kernels.implementation import Row
from llmcl.runtime.device import Device

CLASSES = (nvidia, cpu, portable)  # the last one supports every device


ROWS: tuple[base.Implementation, ...] = tuple(row for folder in CLASSES for row in folder.IMPLEMENTATIONS)


def implementations(kind: type[Row]) -> tuple[Row, ...]:
    """All implementations of an op, such as `LinearDecode`, in the order in which they are preferred."""
    return tuple(row for row in ROWS if isinstance(row, kind))


def pick(kind: type[Row], device: Device, dtype: str, size: int, name: str | None = None) -> Row:
    """The implementation of an op that a device gets for a storage type and a size: `implementation.pick`."""
    return base.pick(implementations(kind), device, dtype, size, name)

"""Counts traffic between the host and a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace


@dataclass
class Traffic:
    """Bytes moved between host and device since the device was opened, and kernels launched."""

    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0
    kernel_launches: int = 0

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.host_to_device_bytes - earlier.host_to_device_bytes,
            self.device_to_host_bytes - earlier.device_to_host_bytes,
            self.kernel_launches - earlier.kernel_launches,
        )

    @classmethod
    def total(cls, each: Iterable[Traffic]) -> Traffic:
        """Returns the sum over several devices."""
        return cls(*map(sum, zip(*map(astuple, each), strict=True)))

    def copy(self) -> Traffic:
        return replace(self)

"""The `cpu` variant of an op."""

from __future__ import annotations

from llmcl.kernels.implementation import Implementation
from llmcl.runtime.device import Device


class CpuVariant(Implementation):
    """Comes first among the bases of an op's variant for CPUs."""

    name = "cpu"

    def supports_device(self, device: Device) -> bool:
        return device.is_cpu

"""Work sizes for kernels that serve every device class, and small arithmetic for all kernels."""

from __future__ import annotations

from llmcl.runtime.device import Device


def local_size(device: Device, wanted: int) -> int:
    """Returns the work-items per group if any power of two works. A CPU gets 1 and relies on vectors."""
    return 1 if device.is_cpu else power_of_two_at_most(min(wanted, device.entry.max_work_group_size))


def run_of(device: Device, n: int, elsewhere: int = 1) -> int:
    """Returns how many of n columns or heads a work-group takes. On a CPU all, because starts are expensive."""
    return n if device.is_cpu else elsewhere


def columns_a_work_item(device: Device) -> int:
    """Returns how many neighbouring columns a work-item computes: a vector on a CPU."""
    return 16 if device.is_cpu else 1


def widest_group(device: Device) -> int:
    """Returns the work-items per group for reductions over a long row with barriers. A CPU gets fewer."""
    return power_of_two_at_most(min(256 if device.is_cpu else 1024, device.entry.max_work_group_size))


def rolls_loops(device: Device) -> int:
    """Returns 1 if a kernel with wide groups should keep its loops rolled: CPU compilers then make faster code."""
    return int(device.is_cpu)


def prefill_chunk(device: Device) -> int:
    """Returns the tokens per prefill chunk: enough to read weights rarely, few enough for small scratch buffers."""
    return 512 if device.is_cpu else 2048


def has_few_registers(device: Device) -> bool:
    """Tells whether the device is an Intel GPU with 128 registers per work-item: too few for a group's queries and 64
    keys, or for 64 sums of a product.
    """
    return "cl_intel_subgroups" in device.entry.extensions


def power_of_two_at_most(limit: int) -> int:
    return 1 << (max(1, limit).bit_length() - 1)


def power_of_two_at_least(limit: int) -> int:
    return 1 << max(0, limit - 1).bit_length()


def largest_divisor(n: int, limit: int) -> int:
    """Returns the largest divisor of n up to limit."""
    return next(d for d in range(min(n, max(1, limit)), 0, -1) if n % d == 0)

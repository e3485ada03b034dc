"""How work is cut for kernels that serve every device class, and small arithmetic for those that do not."""

from __future__ import annotations

from llmcl.runtime.device import Device


def local_size(device: Device, wanted: int) -> int:
    """Work-items of a group for kernels that scale with any power of two: one on a CPU, whose vectors do the rest."""
    return 1 if device.is_cpu else power_of_two_at_most(min(wanted, device.entry.max_work_group_size))


def run_of(device: Device, n: int, elsewhere: int = 1) -> int:
    """How many of n columns or heads a work-group takes: on a CPU all, since starting a group costs as much as many."""
    return n if device.is_cpu else elsewhere


def columns_a_work_item(device: Device) -> int:
    """Neighbouring columns that a work-item computes: a vector of them on a CPU."""
    return 16 if device.is_cpu else 1


def widest_group(device: Device) -> int:
    """Work-items of a group for reductions over a long row, whose work-items meet at barriers: fewer on a CPU."""
    return power_of_two_at_most(min(256 if device.is_cpu else 1024, device.entry.max_work_group_size))


def rolls_loops(device: Device) -> int:
    """1 where a kernel of wide groups keeps its loops rolled: on a CPU, whose compilers make quicker code of them."""
    return int(device.is_cpu)


def prefill_chunk(device: Device) -> int:
    """Tokens that prefill takes at once: enough to read each weight seldom, few enough for small working buffers."""
    return 512 if device.is_cpu else 2048


def has_few_registers(device: Device) -> bool:
    """Intel's GPUs have 128 for a work-item: a group's queries and 64 keys do not fit, nor 64 sums of a product."""
    return "cl_intel_subgroups" in device.entry.extensions


def power_of_two_at_most(limit: int) -> int:
    return 1 << (max(1, limit).bit_length() - 1)


def power_of_two_at_least(limit: int) -> int:
    return 1 << max(0, limit - 1).bit_length()


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most limit."""
    return next(d for d in range(min(n, max(1, limit)), 0, -1) if n % d == 0)

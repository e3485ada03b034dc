"""Which tiles of prefill's attention fit registers and local memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from llmcl.errors import UsageError
from llmcl.kernels.common.dtype import ITEM_BYTES
from llmcl.kernels.variant import largest_divisor
from llmcl.runtime.device import Device

_log = logging.getLogger(__name__)

KERNEL_OPTIONS = ("BLOCK_M", "BLOCK_N", "DV_TILE")
MOST_ROWS = 128  # of a block of queries
MOST_SPLITS = 256
CPU_SUMS = 24  # vectors of sums that fit beside the operands in 32 vector registers


def cpu_tile(rows: int, block_n: int, dv_tile: int, sums: int = CPU_SUMS) -> dict[str, object]:
    """Build constants of cpu/attention_tile.cl: blocks of rows whose `sums`, in vectors, fit the registers."""
    return {
        "ROWS": rows,
        "SCORE_ROWS": _rows_in_registers(rows, block_n // 16, sums),
        "VALUE_ROWS": _rows_in_registers(rows, dv_tile // 16, sums),
        "BLOCK_N": block_n,
        "DV_TILE": dv_tile,
    }


def _rows_in_registers(rows: int, vectors: int, sums: int) -> int:
    return largest_divisor(rows, max(1, sums // vectors))


def dv_tile_for(head_dim: int, rows: int, sums: int = CPU_SUMS) -> int:
    """Output columns with the most multiply-adds for each operand that a block of registers loads."""

    def reuse(vectors: int) -> float:
        height = _rows_in_registers(rows, vectors, sums)
        return height * vectors / (height + vectors)

    return 16 * max((n for n in range(1, head_dim // 16 + 1) if head_dim // 16 % n == 0), key=reuse)


def largest_dv_tile(head_dim: int) -> int:
    """Output columns of the portable variant: at most 128, and a divisor of head_dim."""
    return 16 * largest_divisor(head_dim // 16, 8)


def prefill_local_bytes(head_dim: int, kv_dtype: str, block_m: int, block_n: int) -> int:
    """Local memory of the portable variant: see portable/attention_prefill.cl."""
    staged = ITEM_BYTES.get(kv_dtype, 4)  # quantised keys and values are staged as float32
    return 4 * block_m * (head_dim + 1) + block_n * head_dim * staged + 4 * block_m * (block_n + 1)


def check_prefill_tiles(device: Device, head_dim: int, kv_dtype: str, block_m: int, block_n: int) -> None:
    """Raises UsageError for tiles that the portable variant cannot have on this device."""
    if block_m % 8:
        raise UsageError(f"BLOCK_M is {block_m}; expected a multiple of 8")
    needed, limit = prefill_local_bytes(head_dim, kv_dtype, block_m, block_n), device.entry.local_mem_bytes
    if needed > limit:
        larger = "BLOCK_M" if block_m >= block_n else "BLOCK_N"
        raise UsageError(
            f"attention tiles of BLOCK_M {block_m} and BLOCK_N {block_n} need {needed:,} bytes of local memory, "
            f"{device.name} has {limit:,}; lower {larger}"
        )


def check_kernel_options(options: Mapping[str, int]) -> dict[str, int]:
    """Raises UsageError for anything but positive numbers for the constants that a user may choose."""
    if not isinstance(options, Mapping):
        raise UsageError(f"kernel_options is {options!r}; expected a dict of {', '.join(KERNEL_OPTIONS)}")
    if unknown := set(options) - set(KERNEL_OPTIONS):
        raise UsageError(f"kernel_options has {', '.join(sorted(unknown))}; expected {', '.join(KERNEL_OPTIONS)}")
    for name, value in options.items():
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"kernel_options has {name} {value!r}; expected a whole number, 1 or more")
    return dict(options)


def most_splits(device: Device) -> int:
    """Into how many runs the keys of a head may be cut: more would only wait for each other."""
    return min(MOST_SPLITS, max(8, 4 * device.compute_units))


def tuned_constants(device: Device, key: str) -> Mapping[str, int]:
    """What `llmcl tune` stored under `key`; nothing, after a warning, where it could not have stored that."""
    found = device.findings.tuned.get(key, {})
    most = {"BLOCK_M": MOST_ROWS, "BLOCK_N": MOST_ROWS, "DV_TILE": 1024, "N_SPLITS": most_splits(device)}
    for name, value in found.items():
        if not 1 <= value <= most.get(name, 0):
            _log.warning(
                "%s has %s %d for %s, expected 1 to %d, and is not used for it; `llmcl tune` writes it anew",
                device.findings.path,
                name[:20],
                value,
                key,
                most.get(name, 0),
            )
            del device.findings.tuned[key]
            return {}
    return found

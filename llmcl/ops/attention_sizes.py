"""Checks attention sizes chosen by a user or stored by `llmcl tune`."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from llmcl.errors import MAX_NUMBER, UsageError, one_line, shown
from llmcl.kernels.common.attention import KERNEL_OPTIONS, MAX_ROWS
from llmcl.runtime.device import Device

_log = logging.getLogger(__name__)

MAX_SPLITS = 256


def check_kernel_options(options: Mapping[str, int]) -> dict[str, int]:
    """Returns the checked kernel options. Raises UsageError for anything but positive numbers for known constants."""
    if not isinstance(options, Mapping):
        raise UsageError(f"kernel_options is {shown(options)}; expected a dict of {', '.join(KERNEL_OPTIONS)}")
    if unknown := set(options) - set(KERNEL_OPTIONS):
        names = ", ".join(sorted(map(str, unknown)))
        raise UsageError(f"kernel_options has {one_line(names)}; expected {', '.join(KERNEL_OPTIONS)}")
    for name, value in options.items():
        if not isinstance(value, (int, np.integer)) or not 1 <= value <= MAX_NUMBER:
            raise UsageError(f"kernel_options has {name} {shown(value)}; expected a whole number, 1 or more")
    return {name: int(value) for name, value in options.items()}


def max_splits(device: Device) -> int:
    """Returns the maximum KV splits per head. More splits would only wait for each other."""
    return min(MAX_SPLITS, max(8, 4 * device.compute_units))


def tuned_constants(device: Device, key: str) -> Mapping[str, int]:
    """Returns the constants stored by `llmcl tune` under `key`. Drops impossible values with a warning."""
    tuned = device.cache.tuned.get(key, {})
    most = {"BLOCK_M": MAX_ROWS, "BLOCK_N": MAX_ROWS, "DV_TILE": 1024, "N_SPLITS": max_splits(device)}
    for name, value in tuned.items():
        if not 1 <= value <= most.get(name, 0):
            _log.warning(
                "%s has %s %d for %s, expected 1 to %d, and is not used for it; `llmcl tune` writes it anew",
                device.cache.path,
                name[:20],
                value,
                key,
                most.get(name, 0),
            )
            del device.cache.tuned[key]
            return {}
    return tuned

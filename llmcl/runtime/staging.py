"""Sends small arrays to a busy device through pinned host memory, which the device reads by itself."""

from __future__ import annotations

import numpy as np

from llmcl.runtime.device import Buffer, Device

STAGED_WORDS = 1 << 17  # words of 4 bytes
PARTS = 4


class Staging:
    """A ring of pinned memory. Each part is reused after the device has copied its content.

    The device owns this object, so it does not hold the device.
    """

    def __init__(self, device: Device):
        self._parts = np.split(device.pinned(STAGED_WORDS), PARTS)
        self._copies: list[list[object]] = [[] for _ in range(PARTS)]  # copies from each part, pending or done
        self._part = self._used = 0

    def send(self, device: Device, buffer: Buffer, array: np.ndarray, offset_bytes: int) -> None:
        """Sends an int32 array, at most one part in size."""
        if self._used + array.size > self._parts[self._part].size:
            self._part, self._used = (self._part + 1) % PARTS, 0
            self._copies[self._part].clear()  # waits for the copies
        view = self._parts[self._part][self._used : self._used + array.size]
        view[:] = array.ravel()
        self._used += array.size
        self._copies[self._part].append(device.write_async(buffer, view, offset_bytes))

    def takes(self, array: np.ndarray) -> bool:
        return array.dtype == np.int32 and array.size <= self._parts[0].size


def send(device: Device, buffer: Buffer, array: np.ndarray, offset_bytes: int = 0) -> None:
    """Like `Device.write`, for a small array. On a GPU it does not wait for running work."""
    if not device.runs_ahead:  # nothing is running
        device.write(buffer, array, offset_bytes)
        return
    with device.lock:
        staging: Staging = device.kept.setdefault("staging", None) or Staging(device)
        device.kept["staging"] = staging
        if staging.takes(array):
            staging.send(device, buffer, array, offset_bytes)
        else:
            device.write(buffer, array, offset_bytes)

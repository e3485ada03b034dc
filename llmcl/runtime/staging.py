"""Small arrays on their way to the device while it works: pinned host memory, which the device reads by itself."""

from __future__ import annotations

import numpy as np

from llmcl.runtime.device import Buffer, Device

STAGED_WORDS = 1 << 17  # of 4 bytes
PARTS = 4


class Staging:
    """A ring of pinned memory. A part of it is used again when the device has copied what was in it.

    The device keeps it, so it does not hold the device.
    """

    def __init__(self, device: Device):
        self._parts = np.split(device.pinned(STAGED_WORDS), PARTS)
        self._copies: list[list[object]] = [[] for _ in range(PARTS)]  # of each part, under way or done
        self._part = self._used = 0

    def send(self, device: Device, buffer: Buffer, array: np.ndarray, offset_bytes: int) -> None:
        """array: int32, of a part at most."""
        if self._used + array.size > self._parts[self._part].size:
            self._part, self._used = (self._part + 1) % PARTS, 0
            self._copies[self._part].clear()  # waits for them
        view = self._parts[self._part][self._used : self._used + array.size]
        view[:] = array.ravel()
        self._used += array.size
        self._copies[self._part].append(device.write_async(buffer, view, offset_bytes))

    def takes(self, array: np.ndarray) -> bool:
        return array.dtype == np.int32 and array.size <= self._parts[0].size


def send(device: Device, buffer: Buffer, array: np.ndarray, offset_bytes: int = 0) -> None:
    """As `Device.write`, for a small array, and on a GPU without waiting for the work under way."""
    if not device.runs_ahead:  # nothing is under way
        device.write(buffer, array, offset_bytes)
        return
    with device.lock:
        staging: Staging = device.kept.setdefault("staging", None) or Staging(device)
        device.kept["staging"] = staging
        if staging.takes(array):
            staging.send(device, buffer, array, offset_bytes)
        else:
            device.write(buffer, array, offset_bytes)

"""How far something that takes a while has come."""

from __future__ import annotations

from collections.abc import Callable

# progress(what, done, total): bytes, but for COUNTED kernels, tokens or requests. total: 0 if unknown.
Progress = Callable[[str, int, int], None]

OPENING = "opening the device"  # of unknown length: the first time, a driver is tried in processes of its own
COMPILING = "compiling kernels"
READING = "reading the prompt"
CHECKING = "checking kernels"
ANSWERING = "answering requests"
COUNTED = COMPILING, READING, CHECKING, ANSWERING

"""Reports how far a slow operation has come."""

from __future__ import annotations

from collections.abc import Callable

# progress(what, done, total): counts bytes, except kernels, tokens or requests for COUNTED. total: 0 if unknown.
Progress = Callable[[str, int, int], None]

OPENING = "opening the device"  # unknown duration: at first use, the driver is tested in child processes
LOADING_TOWER = "loading the vision tower"
COMPILING = "compiling kernels"
READING = "reading the prompt"
CHECKING = "checking kernels"
ANSWERING = "answering requests"
COUNTED = COMPILING, READING, CHECKING, ANSWERING

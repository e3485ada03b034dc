"""Every error a user can cause or meet, with the exit code the command line gives it.

A message names the thing, the value found, the value expected, and what to do about it.
"""

from __future__ import annotations

from numbers import Integral


class LlmclError(Exception):
    """Base class: `str(error)` is complete and fit to be shown to a user as it is."""

    exit_code = 1


class UsageError(LlmclError, ValueError):
    """An argument or option with a value that makes no sense (exit code 2, as shells expect)."""

    exit_code = 2


class DeviceError(LlmclError):
    """No OpenCL device, an unknown device, a device that failed or went away."""

    exit_code = 3


class OutOfDeviceMemoryError(DeviceError):
    """The model, its KV cache and its buffers do not fit into the device's memory."""

    exit_code = 4


class KernelBuildError(DeviceError):
    """The device's compiler refused a kernel; the message carries its log."""

    exit_code = 5


class CheckpointError(LlmclError):
    """A checkpoint that is missing, truncated, inconsistent or hostile."""

    exit_code = 6


class UnsupportedModelError(CheckpointError):
    """A checkpoint that is well formed but needs a feature that llmcl does not have."""

    exit_code = 7


class HubError(CheckpointError):
    """A model hub that cannot be reached or does not have the model."""

    exit_code = 8


class ContextLengthError(LlmclError, ValueError):
    """A prompt that does not fit into the context."""

    exit_code = 9


def check_whole(name: str, value: object) -> None:
    """Raises UsageError unless `value` is a whole number, 1 or more."""
    if not isinstance(value, Integral) or value < 1:
        raise UsageError(f"{name} is {value!r}; expected a whole number, 1 or more")

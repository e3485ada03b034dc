"""Every error a user can cause or meet, with the exit code the command line gives it.

A message names the thing, the value found, the value expected, and what to do about it.
"""

from __future__ import annotations

import errno
import reprlib
from numbers import Integral
from typing import Any, TypeVar

E = TypeVar("E", bound="LlmclError")

# What a user can ask for in numbers: sizes in bytes that are made of it are still whole numbers of 128 bits.
MAX_NUMBER = 1 << 62
_SHOWN_CHARACTERS = 80
NO_MORE_FILES = errno.EMFILE, errno.ENFILE  # of an OSError: this process may have no further one open, or no process


class LlmclError(Exception):
    """Base class: `str(error)` is complete and fit to be shown to a user as it is.

    problem: the part of it that says what is wrong, where clients of a server can do something else about it.
    """

    exit_code = 1
    problem = ""

    @classmethod
    def with_remedy(cls: type[E], problem: str, remedy: str) -> E:
        """Two sentences: what is wrong, and what to do about it here."""
        error = cls(f"{problem} {remedy}")
        error.problem = problem
        return error


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
    """A prompt that does not fit into the context.

    size: how long it is, such as "9031 tokens", for clients of a server; "" where that is not known.
    """

    exit_code = 9
    size = ""

    @classmethod
    def with_size(cls, size: str, message: str) -> ContextLengthError:
        error = cls(message)
        error.size = size
        return error


class ServerError(LlmclError):
    """A server cannot be reached, or refuses or breaks off an answer."""

    exit_code = 10


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raises UsageError unless `value` is a whole number, `least` to MAX_NUMBER."""
    if not isinstance(value, Integral) or not least <= int(value) <= MAX_NUMBER:
        raise UsageError(f"{name} is {shown(value)}; expected a whole number, {least} or more and at most 2^62")


def check_flags(**flags: object) -> None:
    """Raises UsageError for one that is neither True nor False: "no" would count as True."""
    for name, value in flags.items():
        if type(value).__name__ not in ("bool", "bool_"):  # or NumPy's
            raise UsageError(f"{name} is {shown(value)}; expected True or False")


def check_text(name: str, value: object) -> None:
    """Raises UsageError unless `value` is a string."""
    if not isinstance(value, str):
        raise UsageError(f"{name} is {shown(value)}; expected a string")


def check_function(name: str, value: object) -> None:
    """Raises UsageError unless `value` is None or can be called."""
    if value is not None and not callable(value):
        raise UsageError(f"{name} is {shown(value)}; expected a function, or None")


def shown(value: object) -> str:
    """A value of a checkpoint or of a user, for a message: as Python writes it, on one line and cut.

    Messages end on terminals and in logs: a control character or a change of the writing direction in what strangers
    wrote would let them say something else there.
    """
    return one_line(_Cut().repr(value), _SHOWN_CHARACTERS)


def counted(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def one_line(text: object, length: int = 200) -> str:
    """The text of another program's error on one line, at most `length` characters, unprintable ones escaped."""
    start = str(text)[: length + 1]
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in start)
    return line if len(line) <= length else line[: length - 3] + "..."


class _Cut(reprlib.Repr):
    """`repr` whose time and length do not grow with the value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxother = _SHOWN_CHARACTERS

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[: _SHOWN_CHARACTERS + 1])

    def repr_int(self, x: int, level: int) -> str:
        n_digits = int(x.bit_length() * 0.30103) + 1  # writing them all takes quadratic time, or is refused
        return repr(x) if n_digits < 40 else f"a number of {n_digits} digits"

    def repr_ndarray(self, x: Any, level: int) -> str:
        return f"{type(x).__name__} of {counted(x.size, 'value')}"

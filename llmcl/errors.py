"""All errors that a user can cause or meet, with the command line's exit codes.

A message names the thing, the value found, the value expected, and the remedy.
"""

from __future__ import annotations

import errno
import reprlib
from numbers import Integral
from typing import Any, TypeVar

E = TypeVar("E", bound="LlmclError")

# The largest number a user may give: byte sizes computed from it still fit in 128 bits.
MAX_NUMBER = 1 << 62
_SHOWN_CHARACTERS = 80
NO_MORE_FILES = errno.EMFILE, errno.ENFILE  # OSError codes: no more open files in this process, or in the system


class LlmclError(Exception):
    """Base class. `str(error)` is complete and can be shown to a user unchanged.

    problem: the part that says what is wrong, for server clients with a different remedy.
    """

    exit_code = 1
    problem = ""

    @classmethod
    def with_remedy(cls: type[E], problem: str, remedy: str) -> E:
        """Builds a message from two sentences: the problem and the remedy."""
        error = cls(f"{problem} {remedy}")
        error.problem = problem
        return error


class UsageError(LlmclError, ValueError):
    """An argument or option with a senseless value (exit code 2, as shells expect)."""

    exit_code = 2


class DeviceError(LlmclError):
    """No OpenCL device, an unknown device, or a device that failed or went away."""

    exit_code = 3


class OutOfDeviceMemoryError(DeviceError):
    """The model, KV cache and buffers do not fit into device memory."""

    exit_code = 4


class KernelBuildError(DeviceError):
    """The device's compiler rejected a kernel; the message includes the log."""

    exit_code = 5


class CheckpointError(LlmclError):
    """A missing, truncated, inconsistent or hostile checkpoint."""

    exit_code = 6


class UnsupportedModelError(CheckpointError):
    """A well-formed checkpoint that needs a feature llmcl does not have."""

    exit_code = 7


class HubError(CheckpointError):
    """A model hub is unreachable or does not have the model."""

    exit_code = 8


class ContextLengthError(LlmclError, ValueError):
    """A prompt that does not fit into the context.

    size: the prompt's length, such as "9031 tokens", for server clients; "" if unknown.
    """

    exit_code = 9
    size = ""

    @classmethod
    def with_size(cls, size: str, message: str) -> ContextLengthError:
        error = cls(message)
        error.size = size
        return error


class ServerError(LlmclError):
    """A server is unreachable, or refuses or breaks off an answer."""

    exit_code = 10


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raises UsageError unless `value` is a whole number, `least` to MAX_NUMBER."""
    if not isinstance(value, Integral) or not least <= int(value) <= MAX_NUMBER:
        raise UsageError(f"{name} is {shown(value)}; expected a whole number, {least} or more and at most 2^62")


def check_flags(**flags: object) -> None:
    """Raises UsageError for a flag that is neither True nor False: "no" would count as True."""
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
    """Formats a value from a checkpoint or a user for a message: like Python's repr, on one line, shortened.

    Messages reach terminals and logs, where control characters or writing-direction marks from strangers could fake
    other output.
    """
    return one_line(_Cut().repr(value), _SHOWN_CHARACTERS)


def counted(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def one_line(text: object, length: int = 200) -> str:
    """Formats another program's error on one line of at most `length` printable characters."""
    start = str(text)[: length + 1]
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in start)
    return line if len(line) <= length else line[: length - 3] + "..."


class _Cut(reprlib.Repr):
    """A `repr` whose time and length do not grow with the value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxother = _SHOWN_CHARACTERS

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[: _SHOWN_CHARACTERS + 1])

    def repr_int(self, x: int, level: int) -> str:
        n_digits = int(x.bit_length() * 0.30103) + 1  # printing all digits takes quadratic time, or is refused
        return repr(x) if n_digits < 40 else f"a number of {n_digits} digits"

    def repr_ndarray(self, x: Any, level: int) -> str:
        return f"{type(x).__name__} of {counted(x.size, 'value')}"

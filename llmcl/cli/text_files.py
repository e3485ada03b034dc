"""Text that a user hands over or asks for, in UTF-8."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from llmcl.errors import LlmclError, UsageError, one_line

MAX_TEXT_BYTES = 1 << 28  # longer than any context; a device such as /dev/zero has no end


def named(option: str, file: object) -> str:
    """An option and its file, for messages: on one line, whatever the file is called."""
    return f"{option} {one_line(file)}"


def read_text(file: str, origin: str) -> str:
    """The text of a file, or of standard input ("-"). Raises UsageError, which begins with `origin`, if it cannot be
    read or is not UTF-8.
    """
    if file == "-":
        return standard_input(origin)
    try:
        with Path(file).open("rb") as stream:
            return stream_text(stream, origin)
    except OSError as error:
        raise UsageError(f"{origin}: cannot be read ({error.strerror}); expected a text file in UTF-8") from error


def standard_input(origin: str) -> str:
    """The text of standard input; raises as `read_text` does. Empty where the command was started without (`<&-`)."""
    return "" if sys.stdin is None else stream_text(sys.stdin.buffer, origin)


def stream_text(stream: BinaryIO, origin: str) -> str:
    """The text that is left in a stream; raises as `read_text` does."""
    return _checked(stream.read(MAX_TEXT_BYTES + 1), origin)


def stream_line(stream: BinaryIO, origin: str) -> str:
    """The next line of a stream with its newline, "" at its end; raises as `read_text` does."""
    return _checked(stream.readline(MAX_TEXT_BYTES + 1), origin)


def _checked(data: bytes, origin: str) -> str:
    if len(data) > MAX_TEXT_BYTES:
        raise UsageError(f"{origin}: has more than {MAX_TEXT_BYTES} bytes; expected a shorter text")
    return decoded(data, origin)


def decoded(data: bytes, origin: str) -> str:
    """UTF-8, with or without a byte order mark, as text; raises UsageError for anything else."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{origin}: byte {error.start} is not UTF-8; expected text in UTF-8") from error


def without_last_newline(text: str) -> str:
    """The text without the newline that an editor puts at the end of a file."""
    return text.removesuffix("\n").removesuffix("\r")


def check_writable(option: str, path: Path | None) -> None:
    """Raises UsageError, before long work and not after it, if the file that an option names cannot be written."""
    if path is not None:
        try:
            path.open("a").close()
        except OSError as error:
            raise UsageError(
                f"{named(option, path)}: cannot be written ({error.strerror}); give a file in a folder that can"
            ) from error


def write_text(option: str, path: Path, text: str) -> None:
    """Raises LlmclError if the file that an option names cannot be written in the end, as on a full disk."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LlmclError(
            f"{named(option, path)}: cannot be written ({error.strerror}); make room, or name another file"
        ) from error


def hand_over(*ways: Callable[[], None]) -> None:
    """Calls all in turn, so that what came of long work is not lost where one fails. Then raises the first error."""
    errors: list[Exception] = []
    for way in ways:
        try:
            way()
        except (LlmclError, OSError) as error:
            errors.append(error)
    if errors:
        raise errors[0]

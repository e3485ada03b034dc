"""Reads and writes users' text files, in UTF-8."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from llmcl.errors import LlmclError, UsageError, one_line

MAX_TEXT_BYTES = 1 << 28  # longer than any context; a device such as /dev/zero never ends


def named(option: str, file: object) -> str:
    """Formats an option and its file for messages, on one line whatever the file name."""
    return f"{option} {one_line(file)}"


def read_text(file: str, origin: str) -> str:
    """Reads a file, or standard input ("-"). Raises UsageError, beginning with `origin`, if unreadable or not UTF-8."""
    if file == "-":
        return standard_input(origin)
    try:
        with Path(file).open("rb") as stream:
            return stream_text(stream, origin)
    except OSError as error:
        raise UsageError(f"{origin}: cannot be read ({error.strerror}); expected a text file in UTF-8") from error


def standard_input(origin: str) -> str:
    """Reads standard input; "" if the command was started without it (`<&-`). Raises like `read_text`."""
    return "" if sys.stdin is None else stream_text(sys.stdin.buffer, origin)


def stream_text(stream: BinaryIO, origin: str) -> str:
    """Reads the rest of a stream. Raises like `read_text`."""
    return _checked(stream.read(MAX_TEXT_BYTES + 1), origin)


def stream_line(stream: BinaryIO, origin: str) -> str:
    """Returns a stream's next line with its newline, "" at the end. Raises like `read_text`."""
    return _checked(stream.readline(MAX_TEXT_BYTES + 1), origin)


def _checked(data: bytes, origin: str) -> str:
    if len(data) > MAX_TEXT_BYTES:
        raise UsageError(f"{origin}: has more than {MAX_TEXT_BYTES} bytes; expected a shorter text")
    return decoded(data, origin)


def decoded(data: bytes, origin: str) -> str:
    """Decodes UTF-8, with or without a byte order mark. Raises UsageError for anything else."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{origin}: byte {error.start} is not UTF-8; expected text in UTF-8") from error


def without_last_newline(text: str) -> str:
    """Removes the newline that editors put at the end of a file."""
    return text.removesuffix("\n").removesuffix("\r")


def check_writable(option: str, path: Path | None) -> None:
    """Raises UsageError if an option's file cannot be written, before long work starts."""
    if path is not None:
        try:
            path.open("a").close()
        except OSError as error:
            raise UsageError(
                f"{named(option, path)}: cannot be written ({error.strerror}); give a file in a folder that can"
            ) from error


def write_text(option: str, path: Path, text: str) -> None:
    """Writes a file. Raises LlmclError if an option's file cannot be written after all, as on a full disk."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LlmclError(
            f"{named(option, path)}: cannot be written ({error.strerror}); make room, or name another file"
        ) from error


def hand_over(*ways: Callable[[], None]) -> None:
    """Calls all functions in turn, even if one fails, to keep the results of long work. Then raises the first error."""
    errors: list[Exception] = []
    for way in ways:
        try:
            way()
        except (LlmclError, OSError) as error:
            errors.append(error)
    if errors:
        raise errors[0]

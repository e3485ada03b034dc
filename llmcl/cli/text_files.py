"""Text that a user hands over, in UTF-8."""

from __future__ import annotations

from pathlib import Path

from llmcl.errors import UsageError


def read_text(file: str, origin: str) -> str:
    """The text of a file. Raises UsageError, which begins with `origin`, if it cannot be read or is not UTF-8."""
    try:
        return decoded(Path(file).read_bytes(), origin)
    except OSError as error:
        raise UsageError(f"{origin}: cannot be read ({error.strerror}); expected a text file in UTF-8") from error


def decoded(data: bytes, origin: str) -> str:
    """UTF-8, with or without a byte order mark, as text; raises UsageError for anything else."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{origin}: byte {error.start} is not UTF-8; expected text in UTF-8") from error


def without_last_newline(text: str) -> str:
    """What an editor puts at the end of a file is not part of a prompt."""
    return text.removesuffix("\n").removesuffix("\r")

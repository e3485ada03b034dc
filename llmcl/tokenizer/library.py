"""Handles errors from the library `tokenizers`, which follows a checkpoint's description."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llmcl.errors import CheckpointError, LlmclError, one_line


@contextmanager
def refusing(problem: str, remedy: str) -> Iterator[None]:
    """Turns any exception inside the block into a CheckpointError: `problem`, the reason, `remedy`."""
    try:
        yield
    except (LlmclError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # also a Rust panic, which is not an Exception
        raise CheckpointError(f"{problem}: {one_line(error)}. {remedy}") from error

"""Errors of the library `tokenizers`, which does what a checkpoint describes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llmcl.errors import CheckpointError, LlmclError, one_line


@contextmanager
def refusing(problem: str, remedy: str) -> Iterator[None]:
    """Turns whatever the library raises inside the block into a CheckpointError: `problem`, its reason, `remedy`."""
    try:
        yield
    except (LlmclError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # also a panic of Rust code, which is no Exception
        raise CheckpointError(f"{problem}: {one_line(error)}. {remedy}") from error

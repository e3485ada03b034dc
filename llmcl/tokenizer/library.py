"""Handles errors from the library `tokenizers`, which follows a checkpoint's description."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock

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


_captured = Lock()


@contextmanager
def without_report() -> Iterator[None]:
    """Keeps Rust's report of a panic inside the block off standard error, which gets everything else afterwards.

    Rust writes to the file descriptor, which all threads share. Therefore only texts for regular expressions that may
    give up are encoded in such a block.
    """
    with _captured, tempfile.TemporaryFile() as file:
        try:
            stderr = os.dup(2)
        except OSError:  # the process has no standard error
            yield
            return
        panicked = False
        try:
            os.dup2(file.fileno(), 2)
            yield
        except BaseException as error:
            panicked = not isinstance(error, Exception)
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            written = file.read()
            if panicked:
                written = written.partition(b"\nthread '")[0]
            with suppress(OSError):
                os.write(2, written)

"""Pictures named on the command line and in a chat."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmcl.cli.loading import progress_bar
from llmcl.errors import UsageError, one_line

if TYPE_CHECKING:
    from llmcl.engine.llm import LLM


def check_pictures(files: Sequence[str]) -> None:
    """Raises UsageError unless each file is a picture: before a model is loaded for it."""
    from llmcl.vision.picture import read_picture

    for file in files:
        read_picture(file)


def load_tower(llm: LLM, *, quiet: bool) -> None:
    """Loads the vision tower, with a progress bar. Raises UsageError for a model without one."""
    with progress_bar(quiet) as progress:
        llm.images.vision(progress)


def picture_and_text(argument: str) -> tuple[str, str]:
    """Splits "FILE TEXT" and returns the absolute path and the text.

    The path may be quoted or have escaped spaces, as terminals write a dropped file. Otherwise the longest beginning
    that is a file counts. Raises UsageError for no file.
    """
    words = argument.split(" ")
    for n in range(len(words), 0, -1):
        start = " ".join(words[:n])
        for path in (start, *_unquoted(start)):
            if (file := Path(path).expanduser()).is_file():
                return str(file.resolve()), " ".join(words[n:]).strip()
    raise UsageError(f"/image {one_line(words[0], 60)}: there is no such file")


def _unquoted(text: str) -> list[str]:
    """Returns the word that a shell reads, in a list; an empty list for none or several."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quote without its end
        return []
    return words if len(words) == 1 else []

"""Several models behind one port: which they are, and how a process for one is started."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmcl.cli.option_groups import LoadingToAnswer
from llmcl.errors import UsageError, one_line
from llmcl.runtime import child_process
from llmcl.serve.model_facts import model_name
from llmcl.serve.model_process import ModelProcess
from llmcl.serve.router import model_state_dir, serve_models
from llmcl.serve.router_models import RouterOptions
from llmcl.serve.settings import Settings

_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_PART = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True)
class Several:
    """Which models a router serves, and how many at once."""

    names: Sequence[str]
    folder: Path | None
    most: int
    autoload: bool
    idle_s: float | None

    def scan(self) -> dict[str, str]:
        """Returns the sources of all models by name. Raises UsageError for an unusable folder and equal names."""
        sources: dict[str, str] = {}
        listed = [(model_name(source), source) for source in self.names]
        for name, source in listed + ([] if self.folder is None else _in_folder(self.folder)):
            if name in sources:
                raise UsageError(f"two models have the name {name}: {sources[name]} and {source}; rename one")
            sources[name] = source
        return sources


def _in_folder(folder: Path) -> list[tuple[str, str]]:
    """Returns names and sources of the models in a folder: GGUF files, or their first parts, and folders with these or
    in Hugging Face format.
    """
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise UsageError(f"--models-dir {one_line(folder)}: {error.strerror}; give a folder with models") from error
    models = []
    for entry in entries:
        if (entry / "config.json").is_file():
            models.append((entry.name, str(entry)))
        elif entry.is_dir():
            models += [(entry.name, str(file)) for file in _gguf_files(sorted(entry.iterdir()))[:1]]
        else:
            models += [(_PART.sub("", file.stem), str(file)) for file in _gguf_files([entry])]
    if not models:
        raise UsageError(
            f"--models-dir {one_line(folder)}: has no models; expected .gguf files, or folders with config.json"
        )
    return models


def _gguf_files(entries: Sequence[Path]) -> list[Path]:
    """Returns the GGUF files of language models: no later parts, and no encoders for images (mmproj)."""
    files = [entry for entry in entries if entry.suffix == ".gguf" and entry.is_file()]
    return [file for file in files if "mmproj" not in file.name and not _LATER_PART.search(file.name)]


def serve_several(
    settings: Settings, several: Several, engine: dict[str, Any], loading: LoadingToAnswer, *, verbose: bool
) -> None:
    """Serves models until a signal comes. engine: the options of each model's engine."""
    command = child_process.command("llmcl.cli.router_child")
    names = ("max_sequences", "max_queue", "log_format", "quiet", "drain_s", "image_hosts")
    kept = {name: getattr(settings, name) for name in names}

    def start(name: str, source: str, log: Callable[[str], None]) -> ModelProcess:
        folder = None if settings.state_dir is None else str(model_state_dir(settings.state_dir.absolute(), name))
        spec = {"model": source, "name": name, "engine": engine, "loading": asdict(loading), "verbose": verbose}
        return ModelProcess(command, {**spec, "settings": kept, "state_dir": folder}, log)

    def say(line: str) -> None:
        if not settings.quiet or ": error: " in line:
            with suppress(OSError):  # a full disk or a closed pipe
                sys.stderr.write(line + "\n")  # at once: several threads write
                sys.stderr.flush()

    options = RouterOptions(
        several.scan,
        start,
        say,
        most=several.most,
        autoload=several.autoload,
        idle_s=several.idle_s,
        drain_s=settings.drain_s,
        max_waiting=settings.max_in_flight,
    )
    serve_models(settings, options)

"""`llmcl pull`, `list`, `show` and `rm`: the models in the local hub cache."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcl.cli import options as opt
from llmcl.errors import CheckpointError, HubError, LlmclError, UsageError, counted, one_line
from llmcl.tools import json_text

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

PANEL = "Arguments"
ModelName = Annotated[str, typer.Argument(metavar="MODEL", rich_help_panel=PANEL, help=opt.MODEL_HELP)]


@dataclass(frozen=True)
class Downloaded:
    """A cached model: a folder with safetensors files, or a GGUF file with all its parts."""

    name: str  # value for -m
    format: str
    size: int  # bytes on disk
    used: str  # date last used
    paths: tuple[Path, ...]


def pull(model: ModelName, quiet: opt.Quiet = False) -> None:
    """Download a model from the hub, so that it starts at once and without the network."""
    from llmcl.checkpoint import resolve
    from llmcl.cli.loading import progress_bar

    with progress_bar(quiet) as progress:
        path = resolve(model, offline=False, progress=progress)
    print(f"{one_line(model)}: {_size(_bytes_of(path))} in {one_line(path)}")


def list_(format: opt.Format = "text") -> None:
    """List the downloaded models: what -m takes, format, size and date of the last use."""
    models = list(_downloaded(_cache()))
    if format == "json":
        print(json_text.dumps([vars(model) | {"paths": [str(path) for path in model.paths]} for model in models]))
        return
    if not models:
        print("no model is downloaded; llmcl pull MODEL downloads one, and -m MODEL as well", file=sys.stderr)
        return
    from llmcl.cli.tables import console, new_table

    table = new_table()
    table.add_column("model", overflow="fold")
    for name in ("format", "size", "last used"):
        table.add_column(name, no_wrap=True, justify="right" if name == "size" else "left")
    for model in models:
        table.add_row(model.name, model.format, _size(model.size), model.used)
    console().print(table)


def show(model: ModelName, offline: opt.Offline = False, format: opt.Format = "text") -> None:
    """Describe a model: family, parameters, formats of its weights, context and size. Downloads it if need be."""
    from llmcl.checkpoint import open_checkpoint
    from llmcl.checkpoint.safetensors import quant_method
    from llmcl.cli.loading import progress_bar

    with progress_bar(False) as progress:
        checkpoint = open_checkpoint(model, offline=offline, progress=progress)
    config = checkpoint.config
    formats: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        formats[tensor.format] = formats.get(tensor.format, 0) + tensor.n_bytes
    described: dict[str, Any] = {
        "model": one_line(model),
        "family": config.architecture,
        "parameters": config.n_parameters(),
        "size": sum(formats.values()),
        "weights": formats,
        "context": config.max_position,
        "layers": len(config.layers),
        "hidden size": config.hidden_size,
        "vocabulary": config.vocab_size,
    }
    if checkpoint.path.is_dir() and (method := quant_method(checkpoint.path)):
        described["quantised by"] = method
    if format == "json":
        print(json_text.dumps(described))
        return
    shares = sorted(formats.items(), key=lambda item: -item[1])
    described["parameters"] = f"{described['parameters'] / 1e6:,.0f} million"
    described["size"] = _size(described["size"])
    described["weights"] = ", ".join(f"{name} {_size(n_bytes)}" for name, n_bytes in shares)
    for name, value in described.items():
        print(f"{name:<12} {value}")


def rm(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", rich_help_panel=PANEL, help="Names from llmcl list.")
    ],
    yes: Annotated[bool, typer.Option("-y", "--yes", rich_help_panel="Other", help="Delete without asking.")] = False,
) -> None:
    """Delete downloaded models from the cache."""
    from llmcl.checkpoint import short_name

    cache = _cache()
    there = list(_downloaded(cache))
    chosen: list[Downloaded] = []
    for given in map(short_name, models):
        matches = [
            model for model in there if given.lower() in (model.name.lower(), model.name.rpartition(":")[0].lower())
        ]
        if not matches:
            names = ", ".join(model.name for model in there) or "none"
            raise UsageError(f"{one_line(given)} is not downloaded; there are: {one_line(names, 800)}")
        chosen += [model for model in matches if model not in chosen]
    for model in chosen:
        print(f"{model.name}  {model.format}  {_size(model.size)}", file=sys.stderr)
    if not yes:
        if not sys.stdin or not sys.stdin.isatty():
            raise UsageError("nobody can be asked whether to delete them; give --yes")
        print("Delete? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("nothing deleted", file=sys.stderr)
            return
    _delete(cache, chosen)
    print(f"{counted(len(chosen), 'model')} deleted, {_size(sum(model.size for model in chosen))} free again")


def _cache() -> HFCacheInfo | None:
    """Returns the hub cache; None if there is none yet."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None
    except (OSError, ValueError) as error:
        raise HubError(f"the cache of the hub cannot be read ({one_line(error)}); check HF_HOME.") from error


def _downloaded(cache: HFCacheInfo | None) -> Iterator[Downloaded]:
    """Yields the cached models by name, skipping entries without weights."""
    from llmcl.checkpoint.gguf import part_names
    from llmcl.checkpoint.hub import quantisation
    from llmcl.checkpoint.safetensors import quant_method

    repos = cache.repos if cache is not None else ()
    for repo in sorted(repos, key=lambda repo: repo.repo_id.lower()):
        if repo.repo_type != "model" or not repo.revisions:
            continue
        revision: Any = repo.refs.get("main") or max(repo.revisions, key=lambda revision: revision.last_modified)
        used = datetime.fromtimestamp(repo.last_accessed).strftime("%Y-%m-%d")
        inside = {file.file_path.relative_to(revision.snapshot_path).as_posix(): file for file in revision.files}
        for file in sorted(file for file in inside if file.endswith(".gguf")):
            parts = [part for part in part_names(file) if part in inside]
            if file != parts[0]:
                continue
            size = sum(inside[part].size_on_disk for part in parts)
            paths = tuple(inside[part].file_path for part in parts)
            kind = f"GGUF {quantisation(file) or ''}".strip()
            yield Downloaded(f"{repo.repo_id}:{file}", kind, size, used, paths)
        weights = [file for file in revision.files if file.file_name.endswith(".safetensors")]
        if weights:
            size = sum(file.size_on_disk for file in revision.files if not file.file_name.endswith(".gguf"))
            kind = f"safetensors {quant_method(revision.snapshot_path) or ''}".strip()
            yield Downloaded(repo.repo_id, kind, size, used, (revision.snapshot_path,))


def _delete(cache: HFCacheInfo | None, chosen: list[Downloaded]) -> None:
    """Deletes models. Deletes a whole repository if nothing else is left."""
    kept = {model.name.partition(":")[0] for model in _downloaded(cache) if model not in chosen}
    whole = {model.name.partition(":")[0] for model in chosen} - kept
    try:
        for repo in cache.repos if cache is not None else ():
            if repo.repo_type == "model" and repo.repo_id in whole:
                hashes = [revision.commit_hash for revision in repo.revisions]
                assert cache is not None
                # passes one repository: copies share commits, and a copy could be deleted instead
                replace(cache, repos=frozenset([repo])).delete_revisions(*hashes).execute()
        for model in chosen:
            if model.name.partition(":")[0] not in whole:
                for path in model.paths:
                    _delete_files(path)
    except OSError as error:
        raise LlmclError(f"{error.filename}: cannot be deleted ({error.strerror}); check its folder") from error


def _delete_files(path: Path) -> None:
    """Deletes a snapshot's file, or all its safetensors files, together with the linked data."""
    for file in [path] if path.is_file() else list(path.glob("*.safetensors")):
        target = Path(os.path.realpath(file))
        file.unlink()
        target.unlink(missing_ok=True)


def _bytes_of(path: Path) -> int:
    from llmcl.checkpoint.gguf import part_names

    if path.is_file():
        parts = map(path.with_name, part_names(path.name))
        return sum(part.stat().st_size for part in parts if part.exists())
    files = [file for file in path.rglob("*") if file.is_file()]
    if not files:
        raise CheckpointError(f"{one_line(path)} holds no files. Fetch the model again.")
    return sum(file.stat().st_size for file in files)


def _size(n_bytes: int) -> str:
    for unit in ("bytes", "KB", "MB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit != "MB" else f"{n_bytes:.1f} MB"
        n_bytes /= 1000  # type: ignore[assignment]
    return f"{n_bytes:.1f} GB"

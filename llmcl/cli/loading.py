"""Loading a model for a command, with its progress on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmcl.cli.option_groups import Loading
    from llmcl.llm import LLM
    from llmcl.model_weights import Progress as ProgressCallback
    from llmcl.runtime.device import Device


@contextmanager
def progress_bar(quiet: bool) -> Iterator[ProgressCallback | None]:
    """Yields `progress(what, done_bytes, total_bytes)`, drawn on standard error where that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done_bytes: int, total_bytes: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total_bytes)
            bar.update(tasks[what], completed=done_bytes, total=total_bytes)

        yield progress


def load_model(
    model: str | None,
    loading: Loading,
    *,
    random: str | None = None,
    device: Device | None = None,
    ctx_size: int | None,
    kv_page_size: int | None = None,
    combo: str | None = None,
    quiet: bool,
) -> LLM:
    """`llmcl.load` with a progress bar, or `llmcl.load_random` of the shape `random`.

    device: in place of the one that `loading` names. Says on standard error what was loaded and where it runs.
    """
    import llmcl

    settings: dict[str, Any] = {
        "device": device or loading.device,
        "dtype": loading.dtype,
        "activation_dtype": loading.activation_dtype,
        "kv_dtype": loading.kv_dtype,
        "max_context": ctx_size,
        "kv_page_tokens": kv_page_size,
    }
    if combo is not None:
        from llmcl.attention.tuning import combination

        settings["kernel_options"] = combination(combo)
    if random is not None:
        llm = llmcl.load_random(random, **settings)
    else:
        with progress_bar(quiet) as progress:
            llm = llmcl.load(
                str(model), offline=loading.offline, progress=progress, quantize=loading.quantize, **settings
            )
    if not quiet:
        print(f"model: {llm.model_name}, {llm.dtype}, context of {llm.max_context} tokens", file=sys.stderr)
        print(f"device: {llm.device.entry.label}", file=sys.stderr)
    return llm

"""Loads a model for a command, and shows progress on a terminal."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from llmcl.cli.text_files import named, read_text
from llmcl.errors import UsageError, counted, one_line
from llmcl.progress import COUNTED, Progress

if TYPE_CHECKING:
    from llmcl.cli.option_groups import Loading, LoadingToAnswer
    from llmcl.engine.llm import LLM
    from llmcl.runtime.device import Device

READING_DELAY_S = 0.5  # a faster prefill shows no bar


def draws_progress(quiet: bool) -> bool:
    """Returns whether standard error is a terminal with erasable output."""
    return not quiet and sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress | None]:
    """Yields a progress function (llmcl/progress.py) drawing on standard error; None if nothing is drawn."""
    if not draws_progress(quiet):
        yield None
        return
    from rich import progress as rich
    from rich.console import Console
    from rich.table import Column

    class Amount(rich.DownloadColumn):
        """Bytes with speed, or plain numbers. Empty before an operation of unknown length begins."""

        def render(self, task: rich.Task) -> Any:
            if task.total is None and not task.completed:
                return ""
            if task.description in COUNTED:
                return f"{int(task.completed)}/{int(task.total or 0)}"
            return super().render(task) + " " + rich.TransferSpeedColumn().render(task)

    columns = rich.TextColumn("{task.description}"), rich.BarColumn(), Amount(table_column=Column(no_wrap=True))
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, rich.TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for before in tasks.values():
                    bar.update(before, visible=False)
                tasks[what] = bar.add_task(what, total=None)
            bar.update(tasks[what], completed=done, total=total or None)

        yield progress


@contextmanager
def reading_bar(quiet: bool) -> Iterator[Progress | None]:
    """Like `progress_bar`, for prefill: drawn only if slow, and removed when the answer begins."""
    if not draws_progress(quiet):
        yield None
        return
    start = time.monotonic()
    bar: Progress | None = None
    with ExitStack() as drawn:

        def progress(what: str, done: int, total: int) -> None:
            nonlocal bar
            if done == total:
                drawn.close()
                bar = None
            elif bar is None and time.monotonic() - start > READING_DELAY_S:
                bar = drawn.enter_context(progress_bar(quiet))
            if bar is not None:
                bar(what, done, total)

        yield progress


def load_to_answer(
    model: str,
    loading: LoadingToAnswer,
    *,
    quiet: bool,
    progress: Progress | None = None,
    compile_kernels: bool = True,
) -> LLM:
    """Like `load_model`, for commands answering prompts."""
    from llmcl.tokenizer import chat_template

    chat_template.start()  # runs while this process imports the engine, which keeps one core busy
    return load_model(
        model,
        loading,
        ctx_size=loading.ctx_size,
        kv_page_size=loading.kv_page_size,
        combo=loading.combo,
        chat_template_file=loading.chat_template_file,
        prompt_lookup=loading.prompt_lookup,
        draft_model=loading.draft_model,
        lora=loading.lora,
        mmproj=_mmproj(loading),
        compile_kernels=compile_kernels,
        quiet=quiet,
        progress=progress,
    )


def _mmproj(loading: LoadingToAnswer) -> str | bool | None:
    if loading.mmproj is not None and loading.no_mmproj:
        raise UsageError("--mmproj names a vision tower and --no-mmproj leaves it out: give one of the two")
    return False if loading.no_mmproj else loading.mmproj


def load_model(
    model: str | None,
    loading: Loading,
    *,
    random: str | None = None,
    device: Device | None = None,
    ctx_size: int | None,
    kv_page_size: int | None = None,
    combo: str | None = None,
    chat_template_file: str | None = None,
    prompt_lookup: bool = False,
    draft_model: str | None = None,
    lora: list[str] | None = None,
    mmproj: str | bool | None = None,
    compile_kernels: bool = True,
    quiet: bool,
    progress: Progress | None = None,
) -> LLM:
    """Calls `llmcl.load` with a progress bar, or `llmcl.load_random` with the shape `random`.

    device: overrides the device in `loading`. compile_kernels: see `llmcl.load`. progress: called instead of drawing a
    bar. Prints on standard error what was loaded and where.
    """
    import llmcl

    if not quiet:
        logging.getLogger("llmcl.engine.split").setLevel(logging.INFO)  # says where the layers go, before loading
    settings: dict[str, Any] = {
        "compile_kernels": compile_kernels,
        "device": device or loading.device,
        "split": loading.split,
        "split_shares": loading.split_shares,
        "dtype": loading.dtype,
        "activation_dtype": loading.activation_dtype,
        "kv_dtype": loading.kv_dtype,
        "max_context": ctx_size,
        "kv_page_tokens": kv_page_size,
    }
    if chat_template_file is not None:
        settings["chat_template"] = read_text(chat_template_file, named("--chat-template-file", chat_template_file))
    if prompt_lookup or draft_model is not None:
        settings |= {"prompt_lookup": prompt_lookup, "draft_model": draft_model}
    if lora:
        settings["lora"] = lora
    if mmproj is not None:
        settings["mmproj"] = mmproj
    if combo is not None:
        from llmcl.tools.tune import combination

        settings["kernel_options"] = combination(combo)
    if random is not None:
        load: Any = partial(llmcl.load_random, random)
    else:
        load = partial(llmcl.load, str(model), offline=loading.offline, quantize=loading.quantize)
    with progress_bar(quiet or progress is not None) as bar:
        llm: LLM = load(progress=progress or bar, **settings)
    if not quiet:
        name = one_line(llm.model_name)
        print(f"model: {name}, {llm.dtype}, context of {counted(llm.max_context, 'token')}", file=sys.stderr)
        print(f"device: {', '.join(each.entry.label for each in llm.devices)}", file=sys.stderr)
    return llm

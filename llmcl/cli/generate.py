"""`llmcl generate`: answers one prompt, or a file of requests."""

from __future__ import annotations

import os
import secrets
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcl.cli import options as opt
from llmcl.cli.answer import show
from llmcl.cli.loading import load_to_answer, progress_bar, reading_bar
from llmcl.cli.option_groups import LoadingToAnswer, Sampling, Structure, with_groups
from llmcl.cli.pictures import check_pictures, load_tower
from llmcl.cli.text_files import check_writable, decoded, named, read_text, standard_input, without_last_newline
from llmcl.errors import UsageError, counted, one_line
from llmcl.tools import json_text

if TYPE_CHECKING:
    from llmcl.engine.llm import LLM
    from llmcl.tools.request_file import FileRequest

EPILOG = opt.METRICS

Prompt = Annotated[
    str | None,
    opt.option(
        "Prompt", "-p", "--prompt", metavar="TEXT", help="The prompt. - reads it from standard input, as a pipe does."
    ),
]
PromptFile = Annotated[
    str | None,
    opt.option(
        "Prompt",
        "-f",
        "--file",
        metavar="FILE",
        help="Read the prompt from a file (UTF-8). One final newline is dropped.",
    ),
]
Raw = Annotated[
    bool, opt.option("Prompt", "--raw", help="Pass the prompt to the model as it is, without the chat template.")
]
ImageFiles = Annotated[
    list[str] | None,
    opt.option(
        "Prompt",
        "--image",
        metavar="FILE",
        env=False,
        help="Show the model a picture (PNG, JPEG, WebP, GIF, BMP) before the prompt. May be given several times.",
    ),
]
FILE_PANEL = "Many prompts"
RequestFile = Annotated[
    str | None,
    opt.option(
        FILE_PANEL,
        "--input",
        metavar="FILE",
        env=False,
        help='Answer a file of requests, one per line: {"prompt": "..."} or {"messages": [...]}, optionally with '
        "id, max_tokens, temperature, seed, stop...",
    ),
]
ResultFile = Annotated[
    str | None,
    opt.option(
        FILE_PANEL,
        "--output",
        metavar="FILE",
        env=False,
        help="Append the results to this file, one per line. Requests with a result in it are skipped.",
    ),
]
MaxSequences = Annotated[
    int | None,
    opt.option(
        FILE_PANEL,
        "--max-sequences",
        metavar="N",
        parser=opt.whole(1),
        help="Answers to make at the same time.  [default: 8]",
    ),
]


@with_groups
def generate(
    ctx: typer.Context,
    model: opt.Model,
    prompt: Prompt = None,
    file: PromptFile = None,
    image: ImageFiles = None,
    raw: Raw = False,
    system_prompt: opt.SystemPrompt = None,
    requests: RequestFile = None,
    results: ResultFile = None,
    max_sequences: MaxSequences = None,
    batch_invariant: Annotated[bool, opt.batch_invariant(FILE_PANEL)] = False,
    sampling: Sampling = Sampling(),
    structure: Structure = Structure(),
    loading: LoadingToAnswer = LoadingToAnswer(),
    format: opt.Format = "text",
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Stream a model's answer, or answer a file of requests.

    The text goes to standard output, the device and the timing report to standard error.
    """
    asked, text = None, ""
    if requests is None and results is None:
        on_command_line = any(_source(ctx, name) == "COMMANDLINE" for name in ("prompt", "file"))
        piped = piped_text() if not on_command_line and (prompt or file) else ""  # a pipe overrides LLMCL_PROMPT
        text = piped or read_prompt(*_given_on_command_line(ctx, prompt, file))
    else:
        if any(_source(ctx, name) == "COMMANDLINE" for name in ("prompt", "file")):
            raise UsageError("-p/--prompt or -f/--file gives a prompt and --input a file of requests: give one of them")
        asked = read_requests(requests, results)
    for name, value in (("system_prompt", system_prompt), ("chat_template_file", loading.chat_template_file)):
        raw = raw and (value is None or _leaves_out(ctx, name))
    if raw:
        system_prompt = None
    if to_match := structure.arguments():
        from llmcl.grammar import Grammar

        Grammar.of(**to_match)  # reports errors before a model is loaded
    request = sampling.arguments(quiet=quiet) | to_match | {"raw": raw, "system_prompt": system_prompt}
    if image:
        if asked is not None:
            raise UsageError("--image belongs to one prompt; in a file of requests, messages have image parts")
        check_pictures(image)
        request["images"] = [*image]
    with load_to_answer(model, loading, quiet=quiet) as llm:
        if image:
            load_tower(llm, quiet=quiet)
        if asked is not None:
            sizes = {"max_sequences": max_sequences, "kv_page_tokens": loading.kv_page_size}
            batch_options: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
            batch_options["batch_invariant"] = batch_invariant
            answer_file(llm, asked, Path(str(results)), request, batch_options, quiet=quiet)
            return
        if format == "json":
            with reading_bar(quiet) as progress:
                result = llm.generate(text, progress=progress, **request)
            print(
                json_text.dumps(
                    {
                        "text": result.text,
                        "token_ids": result.token_ids,
                        "prompt_token_ids": result.prompt_token_ids,
                        "finish_reason": result.finish_reason,
                        "model": llm.model_name,
                        "device": llm.place,
                        "stats": result.stats.to_dict(),
                    }
                ),
                flush=True,
            )
            return
        with reading_bar(quiet) as progress:
            answer = show(llm.stream(text, progress=progress, **request))
        print(flush=True)
        if not quiet:
            if (reason := answer.why_cut(sampling.max_tokens)) is not None:
                print(reason, file=sys.stderr)
            print(answer.report(), file=sys.stderr)
        if answer.interrupted:
            raise KeyboardInterrupt


def read_requests(requests: str | None, results: str | None) -> list[FileRequest]:
    """Reads the requests in --input and checks --output. Raises UsageError if either is unusable."""
    if requests is None or results is None:
        raise UsageError(
            "--input FILE and --output FILE belong together: give both, one with requests, the other for results"
        )
    if os.path.exists(results) and os.path.exists(requests) and os.path.samefile(requests, results):
        raise UsageError(f"--input and --output are both {one_line(requests)}; give another file for the results")
    if results == "-":
        raise UsageError("no results are written to standard output; give the name of a file (./- for -)")
    from llmcl.tools.request_file import check_is_plain, parse_requests

    check_is_plain(Path(results))
    origin = named("--input", requests)
    parsed = parse_requests(read_text(requests, origin), origin)
    check_writable("--output", Path(results))
    return parsed


def answer_file(
    llm: LLM,
    requests: list[FileRequest],
    output: Path,
    defaults: dict[str, Any],
    sizes: dict[str, Any],
    *,
    quiet: bool,
) -> None:
    """Answers the requests without a result in `output`. sizes: arguments for `LLM.engine`."""
    from llmcl.tools.request_file import answer_requests

    if defaults["seed"] is None:
        defaults["seed"] = secrets.randbelow(2**32)  # for lines with an own temperature
    start = time.monotonic()
    try:
        with progress_bar(quiet) as progress, llm.engine(progress=progress, **sizes) as engine:
            start = time.monotonic()
            totals = answer_requests(engine, requests, output, defaults, progress)
    except KeyboardInterrupt:
        if not quiet:
            print(f"stopped; {output} has the results so far, and the same command goes on", file=sys.stderr)
        raise
    if not quiet:
        seconds = time.monotonic() - start
        there = f" ({totals.n_before} more were there already)" if totals.n_before else ""
        print(
            f"{counted(totals.n_done, 'answer')}{there}, {counted(totals.n_tokens, 'token')} in {seconds:.1f} s: "
            f"{totals.n_tokens / seconds:.1f} tokens/s",
            file=sys.stderr,
        )


def _given_on_command_line(ctx: typer.Context, prompt: str | None, file: str | None) -> tuple[str | None, str | None]:
    """Lets -p and -f on the command line override LLMCL_PROMPT and LLMCL_FILE."""
    if prompt is not None and file is not None:
        from_environment = {name for name in ("prompt", "file") if _source(ctx, name) == "ENVIRONMENT"}
        if from_environment == {"prompt"}:
            prompt = None
        elif from_environment == {"file"}:
            file = None
    return prompt, file


def _leaves_out(ctx: typer.Context, name: str) -> bool:
    """Returns whether --raw overrides `name`, which needs the chat template: the command line overrides the
    environment.

    Raises UsageError if both were given in the same place.
    """
    if _source(ctx, "raw") == _source(ctx, name):
        option = "--" + name.replace("_", "-")
        raise UsageError(f"--raw leaves out the chat template, so {option} has no place: give one of the two")
    return _source(ctx, "raw") == "COMMANDLINE"


def _source(ctx: typer.Context, parameter: str) -> str:
    source = ctx.get_parameter_source(parameter)
    return source.name if source is not None else ""


def piped_text() -> str:
    """Returns the text from a pipe or file on standard input; "" if there is none."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    with suppress(OSError):  # an in-memory stream has no file number
        mode = os.fstat(sys.stdin.fileno()).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
            return ""
    return without_last_newline(standard_input("standard input"))


def read_prompt(prompt: str | None, file: str | None) -> str:
    """Returns the text from -p, from -f's file, or from standard input ('-', or neither option and a pipe).

    Raises UsageError if both or none are given, the file cannot be read, or the text is empty or not UTF-8.
    """
    if prompt is not None and file is not None:
        raise UsageError(f"-p/--prompt and {named('-f/--file', file)} both give a prompt: give one of the two")
    if file is not None:
        origin = named("-f/--file", file)
        text = without_last_newline(read_text(file, origin))
    elif prompt is None or prompt == "-":
        if prompt is None and (sys.stdin is None or sys.stdin.isatty()):
            raise UsageError(
                "no prompt: give -p/--prompt TEXT or -f/--file FILE, or pipe the prompt into standard input"
            )
        origin = "standard input"
        text = without_last_newline(standard_input(origin))
    else:
        origin = "-p/--prompt"
        text = decoded(os.fsencode(prompt), origin)
    if not text:
        raise UsageError(f"the prompt from {origin} is empty; expected at least one character")
    return text

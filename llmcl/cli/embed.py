"""`llmcl embed`: turns texts into vectors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from llmcl.cli import options as opt
from llmcl.cli.loading import load_model
from llmcl.cli.option_groups import Loading, with_groups
from llmcl.cli.text_files import check_writable, decoded, named, read_text
from llmcl.errors import UsageError, shown
from llmcl.tools import json_text

TEXT_PANEL, EMBEDDING_PANEL = "Text", "Embedding"

EPILOG = """\b
Prints a line of JSON for each text: {"index": 0, "embedding": [0.01, ...]}.
A line of -f's file is a JSON string, or an object with the text in "text" or
"input"."""

Texts = Annotated[
    list[str] | None, typer.Argument(metavar="TEXT...", rich_help_panel=TEXT_PANEL, help="Texts, a vector for each.")
]
File = Annotated[
    str | None,
    opt.option(
        TEXT_PANEL, "-f", "--file", metavar="FILE.jsonl", env=False, help="Texts, one a line. - is standard input."
    ),
]
PromptName = Annotated[
    str | None,
    opt.option(
        EMBEDDING_PANEL,
        "--prompt-name",
        metavar="NAME",
        env=False,
        help="Put this prompt of the model before each text, such as query.",
    ),
]
Dimensions = Annotated[
    int | None,
    opt.option(
        EMBEDDING_PANEL,
        "--dimensions",
        metavar="N",
        parser=opt.whole(1),
        env=False,
        help="Keep the first N values of each vector.  [default: all]",
    ),
]
Truncate = Annotated[
    bool,
    opt.option(EMBEDDING_PANEL, "--truncate", env=False, help="Cut texts that are too long, instead of an error."),
]
NoNormalize = Annotated[
    bool, opt.option(EMBEDDING_PANEL, "--no-normalize", env=False, help="Leave the vectors' length as it is, not 1.")
]
Output = Annotated[
    Path | None,
    opt.option(
        opt.OUTPUT_PANEL,
        "-o",
        "--output",
        metavar="FILE.npy",
        env=False,
        help="Write the vectors to this NumPy file, float32 [texts, values], instead of JSON lines.",
    ),
]


@with_groups
def embed(
    model: opt.Model,
    texts: Texts = None,
    file: File = None,
    ctx_size: opt.ContextSize = None,
    pooling: opt.Pooling = None,
    prompt_name: PromptName = None,
    dimensions: Dimensions = None,
    truncate: Truncate = False,
    no_normalize: NoNormalize = False,
    loading: Loading = Loading(),
    output: Output = None,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Turn texts into vectors (embeddings), to compare or search them."""
    inputs = read_texts(texts or [], file)
    check_writable("-o/--output", output)
    with load_model(model, loading, ctx_size=ctx_size, compile_kernels=False, quiet=quiet) as llm:
        options: dict[str, Any] = {"prompt_name": prompt_name, "dimensions": dimensions, "truncate": truncate}
        vectors = llm.embed(inputs, pooling=pooling, normalize=not no_normalize, **options)
    if output is not None:
        import numpy as np

        with output.open("wb") as stream:
            np.save(stream, vectors)
        return
    for index, vector in enumerate(vectors):
        print(json_text.dumps({"index": index, "embedding": [round(float(value), 8) for value in vector]}))


def read_texts(texts: list[str], file: str | None) -> list[str]:
    """Returns the texts from the command line or from a file. Raises UsageError for none, or for a wrong line."""
    if file is None:
        if not texts:
            raise UsageError('no text: give texts ("a text" "another"), or -f/--file FILE.jsonl')
        return [decoded(os.fsencode(text), "the text") for text in texts]
    origin = "standard input" if file == "-" else named("-f/--file", file)
    if texts:
        raise UsageError(f"texts and {origin} are both given; give one of the two")
    lines = read_text(file, origin).splitlines()
    inputs = [_text(line, f"{origin}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not inputs:
        raise UsageError(f"{origin}: has no texts; expected one a line")
    return inputs


def _text(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f'{place} is {shown(line)}; expected JSON, such as "a text"') from None
    text = value.get("text", value.get("input")) if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise UsageError(f'{place} is {shown(line)}; expected a string, or an object with a string in "text"')
    return text

"""Options shared by commands: names, environment variables, accepted values and help texts."""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from llmcl.errors import MAX_NUMBER, UsageError, shown
from llmcl.sampling_options import PARAMETERS, Parameter

N = TypeVar("N", int, float)

# Shown in help without importing the defining modules.
WEIGHT_DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZE_FORMATS = ("q8_0", "q4_0", "q4_k")
ACTIVATION_DTYPES = ("auto", "float32")
SPLITS = ("auto", "layer", "tensor")
# Names in other engines.
DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "half": "float16",
    "f32": "float32",
    "fp32": "float32",
    "float": "float32",
}
KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "q8_0")

METRICS = """\b
Metrics, printed to standard error when an answer is complete:
  TTFT     time from the request to the first token id on the host
  TBT      time between two tokens on the host, sampling included
  stall    a TBT above twice the median
  TPOT     (time of the last token - time of the first) / (tokens - 1)
  decode   1 / TPOT, in tokens a second
  prefill  prompt tokens a second until the first token"""


def number(kind: type[N], expected: str, accept: Callable[[N], bool]) -> Callable[[Any], N]:
    """Returns a parser for an option's value. `expected` completes "expected ..." in the error message."""

    def parse(text: Any) -> N:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not _is_usable(value) or not accept(value):
            raise typer.BadParameter(f"{shown(text)} given, expected {expected}")
        return value

    return parse


def _is_usable(value: float) -> bool:
    """Returns whether a value is finite and, if whole, small enough for any option."""
    return abs(value) < 1 << 64 if isinstance(value, int) else math.isfinite(value)


def whole(low: int, of: str = "") -> Callable[[Any], int]:
    """Returns a parser for a whole number, `low` or more. of: the unit."""
    return number(
        int, f"a whole number{of and ' of ' + of}, {low} or more (2^62 at most)", lambda n: low <= n <= MAX_NUMBER
    )


def wholes(low: int) -> Callable[[Any], tuple[int, ...]]:
    """Returns a parser for `512` or `512,2048`, each `low` or more."""
    one = number(
        int, f"whole numbers, {low} or more (2^62 at most), separated by commas", lambda n: low <= n <= MAX_NUMBER
    )

    def parse(text: Any) -> tuple[int, ...]:
        return tuple(one(part) for part in str(text).split(","))

    return parse


def _shares(text: Any) -> list[float]:
    one = number(float, "numbers above 0 separated by commas, such as 3,1", lambda n: n > 0)
    return [one(part) for part in str(text).split(",")]


def one_of(*names: str, hint: str = "") -> Callable[[Any], str]:
    """Returns a parser for `names` in any case, and for other engines' names. hint: completes the error message."""
    by_name = {name.lower(): name for name in names}
    by_name |= {alias: name for alias, name in DTYPE_ALIASES.items() if name in names}

    def parse(text: Any) -> str:
        if (name := by_name.get(str(text).lower())) is None:
            raise typer.BadParameter(f"{shown(text)} given, expected one of {', '.join(names)}{hint and '; ' + hint}")
        return name

    return parse


def weight_dtype(text: Any) -> str:
    """Parses a storage type for random weights: WEIGHT_DTYPES, or a quantised format."""
    from llmcl.checkpoint.mixes import MIXES
    from llmcl.kernels.common.dtype import QUANTIZED

    return one_of(*WEIGHT_DTYPES, *QUANTIZED, *MIXES)(text)


def option(panel: str, *names: str, help: str, env: bool = True, **settings: Any) -> Any:
    """Returns a typer option under the heading `panel`. With env, `--some-name` is also read from LLMCL_SOME_NAME.
    Options for a single run, or with another meaning in another command, are not read from there.
    """
    if not env:
        return typer.Option(*names, rich_help_panel=panel, help=help, **settings)
    long_name = next(name for name in names if name.startswith("--"))
    variable = "LLMCL_" + long_name[2:].replace("-", "_").upper()
    return typer.Option(*names, envvar=variable, rich_help_panel=panel, help=help, **settings)


def choice(panel: str, name: str, names: tuple[str, ...], *, help: str, hint: str = "", **settings: Any) -> Any:
    """Returns an option with `names` as allowed values. hint: suggests a likely alternative."""
    return option(panel, name, metavar="|".join(names), parser=one_of(*names, hint=hint), help=help, **settings)


def batch_invariant(panel: str) -> Any:
    """Returns the option for commands with an engine."""
    return option(
        panel, "--batch-invariant", help="Give a request the same tokens alone as beside others. Slower, see the guide."
    )


def measurement(*names: str, help: str, **settings: Any) -> Any:
    """Returns a measurement option."""
    return option("Measurement", *names, help=help, env=False, **settings)


def written(name: str, what: str) -> Any:
    """Returns an option for an output file."""
    return typer.Option(name, metavar="FILE", rich_help_panel=OUTPUT_PANEL, help=f"Also write {what} to this file.")


def plot(what: str) -> Any:
    """Returns the option for a chart file."""
    return typer.Option(
        "--plot", metavar="FILE.png", rich_help_panel=OUTPUT_PANEL, help=f"Draw {what} (needs the extra `plot`)."
    )


MODEL_HELP = (
    "smollm2, a GGUF file, a folder in Hugging Face format, or a model of the hub (owner/name, owner/name:Q4_K_M)."
)

MODEL_PANEL, SAMPLING_PANEL, DEVICE_PANEL, OUTPUT_PANEL = "Model", "Sampling", "Device", "Output"

MODEL_NAMES = "-m", "--model", "-hf"
Model = Annotated[str, option(MODEL_PANEL, *MODEL_NAMES, metavar="NAME|PATH", help=MODEL_HELP)]
OptionalModel = Annotated[
    str | None, option(MODEL_PANEL, *MODEL_NAMES, metavar="NAME|PATH", help="The model, as in llmcl generate.")
]
RandomShape = Annotated[
    str | None,
    option(
        MODEL_PANEL,
        "--random",
        metavar="SHAPE",
        help="Use random weights instead of -m: llama-3.2-1b, another shape (any word lists them) or a config.json.",
    ),
]
POOLINGS = ("mean", "cls", "last")
Pooling = Annotated[
    str | None,
    choice(
        MODEL_PANEL,
        "--pooling",
        POOLINGS,
        help="Row of a text that becomes its embedding: the mean, the first or the last.  [default: the model's own]",
    ),
]
Offline = Annotated[bool, option(MODEL_PANEL, "--offline", help="Use only files on this machine, never the network.")]
ContextSize = Annotated[
    int | None,
    option(
        MODEL_PANEL,
        "-c",
        "--ctx-size",
        metavar="TOKENS",
        parser=whole(1, "tokens"),
        help="Tokens that prompt and answer may have together.  [default: the model's own, up to 4096]",
    ),
]
SystemPrompt = Annotated[
    str | None, option(MODEL_PANEL, "--system-prompt", metavar="TEXT", help="System message for the chat template.")
]
ChatTemplateFile = Annotated[
    str | None,
    option(
        MODEL_PANEL,
        "--chat-template-file",
        metavar="FILE",
        help="Use this chat template (Jinja) instead of the model's own.",
    ),
]
Lora = Annotated[
    list[str] | None,
    option(
        MODEL_PANEL,
        "--lora",
        "--lora-scaled",
        metavar="[NAME=]PATH[:SCALE]",
        env=False,
        help="Apply a LoRA adapter: a PEFT folder or a GGUF file. Can be repeated.",
    ),
]
PromptLookup = Annotated[
    bool,
    option(
        MODEL_PANEL,
        "--prompt-lookup",
        help="Speculative decoding: guess the next tokens from earlier text. Helps when answers quote the prompt.",
    ),
]
DraftModel = Annotated[
    str | None,
    option(
        MODEL_PANEL,
        "--draft-model",
        metavar="NAME|PATH",
        help="Speculative decoding: guess the next tokens with a smaller model of the same vocabulary.",
    ),
]
Mmproj = Annotated[
    str | None,
    option(
        MODEL_PANEL,
        "--mmproj",
        metavar="FILE",
        help="GGUF file with the vision tower of a GGUF model.  [default: mmproj*.gguf beside the model]",
    ),
]
NoMmproj = Annotated[bool, option(MODEL_PANEL, "--no-mmproj", help="Take no images.")]

MaxTokens = Annotated[
    int,
    option(
        SAMPLING_PANEL,
        "-n",
        "--max-tokens",
        "--n-predict",
        metavar="N",
        parser=whole(1),
        help="Maximum tokens of the answer.",
    ),
]


def sampling_option(parameter: Parameter) -> Any:
    """Returns the option for a row of the table of sampling parameters."""
    parser = number(parameter.kind, parameter.typed, parameter.accepts)
    return option(SAMPLING_PANEL, *parameter.flags, metavar=parameter.metavar, parser=parser, help=parameter.help)


Temperature = Annotated[float, sampling_option(PARAMETERS["temperature"])]
Stop = Annotated[
    list[str] | None,
    typer.Option(  # `option_groups` reads the variable: typer would split it at spaces
        "--stop",
        metavar="TEXT",
        rich_help_panel=SAMPLING_PANEL,
        help="End the answer before this text. Can be repeated.  [env var: LLMCL_STOP, one text]",
    ),
]
DryBreaker = Annotated[
    list[str] | None,
    typer.Option(
        "--dry-sequence-breaker",
        metavar="TEXT",
        rich_help_panel=SAMPLING_PANEL,
        help="DRY's repetitions end at this text. Can be repeated; none: nowhere.  "
        "[default: line break, colon, double quote and asterisk]",
    ),
]
IgnoreEos = Annotated[
    bool, option(SAMPLING_PANEL, "--ignore-eos", help="Continue after the model's end-of-text token.")
]

STRUCTURE_PANEL = "Structured output"
JsonSchema = Annotated[
    str | None,
    option(
        STRUCTURE_PANEL,
        "--json-schema",
        metavar="FILE|JSON",
        env=False,
        help="Answer with JSON that matches a schema: a file, or the schema itself, {...}.",
    ),
]
Regex = Annotated[
    str | None,
    option(
        STRUCTURE_PANEL,
        "--regex",
        metavar="TEXT",
        env=False,
        help="Answer with text that matches this regular expression as a whole.",
    ),
]
GrammarFile = Annotated[
    str | None,
    option(
        STRUCTURE_PANEL,
        "--grammar",
        metavar="FILE",
        env=False,
        help="Answer with text of this grammar, in Lark's syntax or GBNF.",
    ),
]

Device = Annotated[
    str | None,
    option(
        DEVICE_PANEL,
        "--device",
        metavar="DEVICE",
        help="An index of `llmcl devices`, part of a name, gpu or cpu; several for one model with commas: 0,1.  "
        "[default: the best one]",
    ),
]
Split = Annotated[
    str | None,
    choice(
        DEVICE_PANEL,
        "--split",
        SPLITS,
        help="How several devices divide a model. layer: consecutive layers on each. auto: the best device alone if "
        "the model fits, else layers.  [default: auto]",
    ),
]
SplitShares = Annotated[
    Any,
    option(
        DEVICE_PANEL,
        "--split-shares",
        metavar="N,...",
        parser=_shares,
        help="Each device's share of the layers, such as 3,1.  [default: by memory speed and size]",
    ),
]


def _say_where_layers_are(layers: str | None) -> None:
    if layers is not None:
        print("-ngl has no effect: all layers are always on the device (--device chooses it)", file=sys.stderr)


def _limit_threads(threads: int | None) -> int | None:
    """Restricts the process to the first `threads` processors. A CPU driver starts a thread per processor."""
    if threads is not None:
        if not hasattr(os, "sched_setaffinity"):
            raise typer.BadParameter("works on Linux only; leave it out")
        processors = sorted(os.sched_getaffinity(0))
        if threads > len(processors):
            raise typer.BadParameter(
                f"{threads} given, expected at most {len(processors)}, the processors of this process"
            )
        os.sched_setaffinity(0, processors[:threads])
    return threads


Threads = Annotated[
    int | None,
    option(
        DEVICE_PANEL,
        "-t",
        "--threads",
        metavar="N",
        parser=whole(1),
        callback=_limit_threads,
        help="Processors to use (Linux only).  [default: all]",
    ),
]
GpuLayers = Annotated[
    str | None,
    option(
        DEVICE_PANEL,
        "-ngl",
        "--n-gpu-layers",
        metavar="N",
        env=False,
        callback=_say_where_layers_are,
        help="Accepted for llama.cpp's users, without effect: all layers are on the device.",
    ),
]
Dtype = Annotated[
    str,
    choice(
        DEVICE_PANEL,
        "--dtype",
        WEIGHT_DTYPES,
        hint="--quantize makes 8-bit and 4-bit weights",
        help="Format of the weights on the device. auto: as stored, quantised or not.",
    ),
]
DtypeOfAny = Annotated[
    str,
    option(
        DEVICE_PANEL,
        "--dtype",
        metavar="|".join(WEIGHT_DTYPES),
        parser=weight_dtype,
        help="Format of the weights on the device. auto: as stored. Random weights can also be q4_0, q4_k_m...",
    ),
]
Quantize = Annotated[
    str | None,
    choice(
        DEVICE_PANEL,
        "--quantize",
        QUANTIZE_FORMATS,
        help="Quantise the weights while loading. Embedding and output head get 8 bits.",
    ),
]
ActivationDtype = Annotated[
    str,
    choice(
        DEVICE_PANEL,
        "--activation-dtype",
        ACTIVATION_DTYPES,
        help="Format of the activations that weights and keys are multiplied by. auto: 8 bits or bfloat16 where the "
        "device has fast dot products for them.",
    ),
]
KvDtype = Annotated[
    str,
    choice(
        DEVICE_PANEL,
        "--kv-dtype",
        KV_DTYPES,
        help="Format of the KV cache. q8_0 (8 bits) takes half the memory of float16.",
    ),
]

KvPageSize = Annotated[
    int | None,
    option(
        DEVICE_PANEL,
        "--kv-page-size",
        metavar="TOKENS",
        parser=number(int, "a multiple of 64 (2^62 at most)", lambda n: 64 <= n <= MAX_NUMBER and n % 64 == 0),
        help="Tokens in a page of the KV cache.  [default: no pages; 64 for several sequences]",
    ),
]

Format = Annotated[str, choice(OUTPUT_PANEL, "--format", ("text", "json"), help="json prints one object at the end.")]


def _log_more(wanted: bool) -> bool:
    """Shows the engine's `logging` messages, which `command.run` prints on standard error."""
    if wanted:
        logging.getLogger("llmcl").setLevel(logging.INFO)
    return wanted


def _silence_warnings(wanted: bool) -> bool:
    if wanted:
        warnings.simplefilter("ignore")
        logging.getLogger("llmcl").setLevel(logging.ERROR)
    return wanted


Verbose = Annotated[
    bool,
    option(
        OUTPUT_PANEL,
        "-v",
        "--verbose",
        callback=_log_more,
        help="Say more on standard error, such as the compile time of each kernel.",
    ),
]
Quiet = Annotated[
    bool,
    option(
        OUTPUT_PANEL,
        "-q",
        "--quiet",
        callback=_silence_warnings,
        help="Write only errors to standard error.",
    ),
]

COMBINATIONS = "ABCDEFGH"
Combo = Annotated[
    str | None,
    option(
        DEVICE_PANEL,
        "--combo",
        metavar="A..H",
        parser=one_of(*COMBINATIONS),
        help="Tile sizes of prefill's attention, a combination of `llmcl tune`.  [default: the fastest that it stored]",
    ),
]

PromptTokens = Annotated[int, measurement("-p", "--n-prompt", metavar="N", parser=whole(1), help="Tokens to prefill.")]
PromptLengths = Annotated[
    Any, measurement("-p", "--n-prompt", metavar="N,...", parser=wholes(0), help="Prefill lengths; 0: none.")
]
GenLengths = Annotated[
    Any, measurement("-n", "--n-gen", metavar="N,...", parser=wholes(0), help="Decode lengths; 0: none.")
]
Depths = Annotated[
    Any, measurement("-d", "--n-depth", metavar="N,...", parser=wholes(0), help="Context before the decodes.")
]
Repetitions = Annotated[
    int, measurement("-r", "--repetitions", metavar="N", parser=whole(1), help="Runs of each test, after a warm-up.")
]
RowsFile = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        help="Write to this file instead of standard output.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]


def check_model_or_random(model: str | None, random: str | None, quantize: str | None = None) -> None:
    """Raises UsageError unless exactly one is given, and --quantize only with a model."""
    if (model is None) == (random is None):
        raise UsageError("give one of -m/--model NAME|PATH and --random SHAPE")
    if random is not None and quantize is not None:
        raise UsageError(f"--quantize is for models that are loaded; for random weights give --dtype {quantize}")

"""Option groups shared by commands: a parameter with a group as default stands for the group's options."""

from __future__ import annotations

import functools
import inspect
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from llmcl.cli import options as opt
from llmcl.cli.text_files import named, read_text
from llmcl.sampling_options import PARAMETERS, SamplingOptions


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command. Typer sees each group's options; the command receives a group with the values."""
    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        group = parameter.default
        if not is_dataclass(group):
            parameters.append(parameter)
            continue
        groups[parameter.name] = group
        annotations = option_hints(type(group))
        for field in fields(group):
            values = {"default": getattr(group, field.name), "annotation": annotations[field.name]}
            parameters.append(parameter.replace(name=field.name, **values))

    @functools.wraps(command)
    def called(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = type(group)(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def option_hints(group: type) -> dict[str, Any]:
    """Returns the annotations of a group's fields for typer. Sampling parameters have theirs from the table."""
    hints = get_type_hints(group, include_extras=True)
    for name, parameter in PARAMETERS.items():
        if name in hints:
            hints[name] = Annotated[hints[name].__origin__, opt.sampling_option(parameter)]
    return hints


@dataclass(frozen=True)
class _AnswerLength:
    max_tokens: opt.MaxTokens = 256


@dataclass(frozen=True)
class Sampling(SamplingOptions, _AnswerLength):
    """How tokens are sampled and when an answer ends."""

    stop: opt.Stop = None
    ignore_eos: opt.IgnoreEos = False
    dry_sequence_breaker: opt.DryBreaker = None

    def values(self) -> dict[str, Any]:
        """Returns the options under the names used by `LLM.stream`."""
        options = asdict(self)
        options["stop"] = _stop_strings(self.stop, os.environ.get("LLMCL_STOP"))
        if breakers := options.pop("dry_sequence_breaker"):
            options["dry_sequence_breakers"] = () if breakers == ["none"] else tuple(breakers)
        return options

    def arguments(self, *, quiet: bool) -> dict[str, Any]:
        """Returns arguments for `LLM.stream`. Draws and reports a missing seed, to make the run repeatable."""
        options = self.values()
        if self.seed is None and self.temperature > 0:
            seed = options["seed"] = secrets.randbelow(2**32)
            if not quiet:
                print(f"seed: {seed} (--seed {seed} draws the same tokens again)", file=sys.stderr)
        return options


def _stop_strings(given: list[str] | None, environment: str | None) -> tuple[str, ...]:
    """Returns the stop strings from the command line, otherwise from LLMCL_STOP. None may be empty."""
    stops = tuple(given) if given else (environment,) if environment else ()
    if "" in stops:
        raise typer.BadParameter("'' given, expected at least one character", param_hint="'--stop'")
    return stops


@dataclass(frozen=True)
class Structure:
    """Constraints on the answer."""

    json_schema: opt.JsonSchema = None
    regex: opt.Regex = None
    grammar: opt.GrammarFile = None

    def arguments(self) -> dict[str, str]:
        """Returns `LLM.stream` arguments for the options given. Raises UsageError for an unreadable file."""
        options = {"regex": self.regex} if self.regex is not None else {}
        for name, option, file in (
            ("schema", "--json-schema", self.json_schema),
            ("grammar", "--grammar", self.grammar),
        ):
            if file is not None:
                is_schema = name == "schema" and file.lstrip().startswith("{")
                options[name] = file if is_schema else read_text(file, named(option, file))
        return options


@dataclass(frozen=True)
class Loading:
    """Where a model runs and how numbers are stored."""

    offline: opt.Offline = False
    device: opt.Device = None
    split: opt.Split = None
    split_shares: opt.SplitShares = None
    threads: opt.Threads = None
    n_gpu_layers: opt.GpuLayers = None
    dtype: opt.Dtype = "auto"
    quantize: opt.Quantize = None
    activation_dtype: opt.ActivationDtype = "auto"
    kv_dtype: opt.KvDtype = "auto"


@dataclass(frozen=True)
class LoadingToAnswer(Loading):
    """Like `Loading`, for answering: context size, chat template, and draft model."""

    ctx_size: opt.ContextSize = None
    chat_template_file: opt.ChatTemplateFile = None
    kv_page_size: opt.KvPageSize = None
    combo: opt.Combo = None
    prompt_lookup: opt.PromptLookup = False
    draft_model: opt.DraftModel = None
    lora: opt.Lora = None
    mmproj: opt.Mmproj = None
    no_mmproj: opt.NoMmproj = False


@dataclass(frozen=True)
class LoadingOrRandom(Loading):
    """Like `Loading`, but --random can replace a model."""

    dtype: opt.DtypeOfAny = "auto"

"""Reads the request fields for sampling and for the end of an answer."""

from __future__ import annotations

from typing import Any

from llmcl.errors import UsageError
from llmcl.sampling_options import PARAMETERS, Parameter
from llmcl.serve.errors import RequestError
from llmcl.serve.fields import Fields, as_whole, wrong
from llmcl.serve.lora_choice import read_lora
from llmcl.serve.served import Served

MAX_STOPS = 16
MAX_ANSWERS = 128  # OpenAI's limit


def read_sampling(fields: Fields, served: Served) -> dict[str, Any]:
    """Returns the matching options of `LLM.stream`. Raises RequestError for a value out of range."""
    # imported late: the server listens before the engine is loaded
    from llmcl.engine.dry_breakers import checked_breakers
    from llmcl.ops.sample import SamplingParams

    options = {name: _parameter(fields, parameter) for name, parameter in PARAMETERS.items()}
    options |= {name: value for name, value in _ends(fields, served.vocab_size).items() if value}
    if (breakers := fields.given("dry_sequence_breakers")) is not None:
        try:
            options["dry_sequence_breakers"] = checked_breakers(breakers)
        except UsageError as error:
            raise RequestError(400, str(error), "dry_sequence_breakers", "invalid_value") from None
    if bias := _bias(fields, served.vocab_size):
        options["logit_bias"] = bias
    try:
        SamplingParams(**{name: value for name, value in options.items() if name not in _ENDS})
    except UsageError as error:
        raise RequestError(400, str(error), str(error).partition(" ")[0], "invalid_value") from None
    return options | read_lora(fields, served)


def _parameter(fields: Fields, parameter: Parameter) -> Any:
    names = parameter.http_fields or (parameter.name,)
    name = next((name for name in names if fields.given(name) is not None), names[0])
    if fields.given(name) is None:
        return parameter.default if parameter.http_default is None else parameter.http_default
    read = fields.number if parameter.kind is float else fields.whole
    value = read(name, 0, *parameter.http_limits)
    return parameter.http_meanings.get(value, value)


_ENDS = "ignore_eos", "min_tokens", "stop_token_ids", "dry_sequence_breakers"


def _ends(fields: Fields, vocab_size: int) -> dict[str, Any]:
    """Reads the fields that end an answer, apart from stop strings. The names are vLLM's; llama-server shares
    ignore_eos.
    """
    values = fields.items("stop_token_ids")
    ids = [i for i in map(as_whole, values) if i is not None and 0 <= i < vocab_size]
    if len(ids) < len(values):
        raise wrong("stop_token_ids", values, f"a list of token ids from 0 to {vocab_size - 1}")
    return {
        "ignore_eos": fields.flag("ignore_eos"),
        "min_tokens": fields.whole("min_tokens", 0, 0),
        "stop_token_ids": tuple(ids),
    }


def max_tokens(fields: Fields, *names: str, default: int | None = None, least: int = 1) -> int | None:
    """Returns the first of the named fields present; None for no limit, which some clients write as -1."""
    for name in names:
        if fields.given(name) is not None:
            most = fields.whole(name, None, -1)
            if most is not None and -1 < most < least:
                raise wrong(name, most, f"a whole number, {least} or more, or -1 for no limit")
            return None if most == -1 else most
    return default


def _bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    """Reads logit_bias: an object that maps token ids (strings in JSON) to numbers."""
    entries, bias = fields.object("logit_bias"), {}
    for name in entries.names():
        if not name.isdecimal() or len(name) > 9 or int(name) >= vocab_size:
            raise wrong("logit_bias", name, f"token ids from 0 to {vocab_size - 1}")
        bias[int(name)] = entries.number(name, 0.0, -100.0, 100.0)
    return bias


def of_choice(options: dict[str, Any], index: int) -> dict[str, Any]:
    """Returns the options for one of several answers to a prompt. With a seed, each answer gets a different seed."""
    if options["seed"] is None or index == 0:
        return options
    return options | {"seed": (options["seed"] + index) % (1 << 64)}

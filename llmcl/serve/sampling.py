"""The fields of a request that say how tokens are chosen and when an answer ends."""

from __future__ import annotations

from typing import Any

from llmcl.errors import UsageError
from llmcl.serve.errors import RequestError
from llmcl.serve.fields import Fields, as_whole, wrong
from llmcl.serve.served import Served

MAX_STOPS = 16
MAX_ANSWERS = 128  # OpenAI's


def read_sampling(fields: Fields, served: Served) -> dict[str, Any]:
    """The options of `LLM.stream` of the same meaning. What is left out is as in OpenAI's API: temperature and top_p 1.

    Raises RequestError for a value out of range.
    """
    from llmcl.ops.sample import RANGE, SamplingParams  # the server listens before the engine is imported

    penalty = "repeat_penalty" if fields.given("repeat_penalty") is not None else "repetition_penalty"
    seed = fields.whole("seed", None, -1, (1 << 64) - 1)
    options: dict[str, Any] = {
        "temperature": fields.number("temperature", 1.0, 0.0, RANGE[1]),
        "top_k": max(0, fields.whole("top_k", 0, -1, (1 << 31) - 1) or 0),
        "top_p": max(fields.number("top_p", 1.0, 0.0, 1.0), RANGE[0]),  # at 0 the likeliest token is left
        "min_p": fields.number("min_p", 0.0, 0.0, 1.0),
        "repeat_penalty": fields.number(penalty, 1.0, 0.0, 1e6, above=True),
        "presence_penalty": fields.number("presence_penalty", 0.0, -2.0, 2.0),
        "frequency_penalty": fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        "seed": None if seed == -1 else seed,  # -1: llama.cpp's word for any
    }
    options |= {name: value for name, value in _ends(fields, served.vocab_size).items() if value}
    if bias := _bias(fields, served.vocab_size):
        options["logit_bias"] = bias
    try:
        SamplingParams(**{name: value for name, value in options.items() if name not in _ENDS})
    except UsageError as error:
        raise RequestError(400, str(error), str(error).partition(" ")[0], "invalid_value") from None
    return options


_ENDS = "ignore_eos", "min_tokens", "stop_token_ids"


def _ends(fields: Fields, vocab_size: int) -> dict[str, Any]:
    """What says where an answer may end, beside texts: vLLM's names, the first of which llama-server has, too."""
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
    """The first of these fields that is there; None for no limit, as which some clients write -1."""
    for name in names:
        if fields.given(name) is not None:
            most = fields.whole(name, None, -1)
            if most is not None and -1 < most < least:
                raise wrong(name, most, f"a whole number, {least} or more, or -1 for no limit")
            return None if most == -1 else most
    return default


def _bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    """logit_bias: an object from token ids, which JSON has as strings, to numbers."""
    given, bias = fields.object("logit_bias"), {}
    for name in given.names():
        if not name.isdecimal() or len(name) > 9 or int(name) >= vocab_size:
            raise wrong("logit_bias", name, f"token ids from 0 to {vocab_size - 1}")
        bias[int(name)] = given.number(name, 0.0, -100.0, 100.0)
    return bias


def of_choice(options: dict[str, Any], index: int) -> dict[str, Any]:
    """The options of one of several answers to a prompt: with a seed, each draws with one of its own."""
    if options["seed"] is None or index == 0:
        return options
    return options | {"seed": (options["seed"] + index) % (1 << 64)}

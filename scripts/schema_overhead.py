#!/usr/bin/env python
"""Measures what structured output adds to the time between tokens, at a vocabulary of real size.

Both kinds of answers take turns: any text, and JSON that matches a schema. Of neighbours either comes first once, so
that what else the machine does meets both alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import numpy as np
from compare_engines import note
from made_vocabulary import made_tokenizer

from llmcl.cli import options as opt
from llmcl.cli.command import run_script
from llmcl.cli.loading import load_model
from llmcl.cli.option_groups import LoadingOrRandom, with_groups
from llmcl.engine.engine import Engine

# Lists and strings of which there is always more to come: no answer ends before its time.
SCHEMA = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 60},
            "kind": {"enum": ["first", "second", "third"]},
            "size": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}, "minItems": 3},
        },
        "required": ["name", "kind", "size", "tags"],
        "additionalProperties": False,
    },
}
EPILOG = """\b
TBT    median time between two tokens over all answers of a turn
ratio  the median over neighbouring turns of one to the other, and its quartiles"""


@dataclass(frozen=True)
class Plan:
    """sequences at once, tokens of a prompt and of an answer, pairs of turns after one that does not count."""

    sequences: int
    n_prompt: int = 32
    n_gen: int = 64
    pairs: int = 10


@with_groups
def schema_overhead(
    model: opt.OptionalModel = None,
    random: opt.RandomShape = None,
    n_parallel: Annotated[
        Any, opt.measurement("-npl", "--n-parallel", metavar="N,...", parser=opt.wholes(1), help="Sequences at once.")
    ] = "1,16",
    n_gen: Annotated[
        int, opt.measurement("-ntg", "--n-gen", metavar="N", parser=opt.whole(3), help="Tokens of an answer.")
    ] = 64,
    pairs: Annotated[
        int, opt.measurement("-r", "--pairs", metavar="N", parser=opt.whole(1), help="Of turns, after a warm-up.")
    ] = 10,
    loading: LoadingOrRandom = LoadingOrRandom(),
) -> None:
    """The time between tokens with a schema and without."""
    opt.check_model_or_random(model, random, loading.quantize)
    plans = [Plan(n, n_gen=n_gen, pairs=pairs) for n in n_parallel]
    context = plans[0].n_prompt + n_gen + 1
    print("| sequences | TBT, ms | with a schema | ratio (quartiles) |\n|---:|---:|---:|---:|")
    with load_model(model, loading, random=random, ctx_size=context, quiet=False) as llm:
        if not llm.has_tokenizer:
            note("making a vocabulary")
            llm.tokenizer = made_tokenizer(llm.config.vocab_size)
        for plan in plans:
            with llm.engine(max_sequences=plan.sequences) as engine:
                print(row(plan, measure(engine, llm.config.vocab_size, plan, note)), flush=True)


def measure(engine: Engine, vocab_size: int, plan: Plan, note: Callable[[str], None]) -> list[tuple[float, float]]:
    """(without, with a schema) of neighbouring turns: the median time between tokens, in milliseconds."""
    rng = np.random.default_rng(0)

    def turn(**options: Any) -> float:
        prompts = rng.integers(1, vocab_size, (plan.sequences, plan.n_prompt)).tolist()
        answers = engine.stream_each(prompts, max_tokens=plan.n_gen, temperature=1.0, seed=0, **options)
        return median(piece.tbt_ms for _, piece in answers if piece.tbt_ms is not None)

    found = []
    for number in range(1 + plan.pairs):
        if number % 2:
            pair = turn(ignore_eos=True), turn(schema=SCHEMA)
        else:
            matched = turn(schema=SCHEMA)
            pair = turn(ignore_eos=True), matched
        found.append(pair)
        note(f"{plan.sequences} at once, {number} of {plan.pairs}: {pair[1] / pair[0]:.3f}")
    return found[1:]


def row(plan: Plan, found: list[tuple[float, float]]) -> str:
    """A row of the table."""
    plain, matched = (median(pair[side] for pair in found) for side in (0, 1))
    low, middle, high = np.quantile([b / a for a, b in found], (0.25, 0.5, 0.75))
    return f"| {plan.sequences} | {plain:.3f} | {matched:.3f} | {middle:.3f} ({low:.3f} to {high:.3f}) |"


if __name__ == "__main__":
    run_script(schema_overhead, EPILOG)

#!/usr/bin/env python
"""Measures what HTTP adds to an engine: the same requests to the engine itself and to a server of it, in turns."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Annotated, Any

import numpy as np

from llmcl.cli import options as opt
from llmcl.cli.command import run_script
from llmcl.cli.loading import load_to_answer
from llmcl.cli.option_groups import LoadingToAnswer, with_groups
from llmcl.engine.engine import Engine

CLIENT = Path(__file__).with_name("server_overhead_client.py")
NEVER = -100.0  # added to the logits of tokens that end answers

EPILOG = """\b
throughput  tokens a second of all streams together, from the first request to the last token
TTFT, TBT   medians over all streams; of HTTP on the client's clock, in a process of its own
added       the median over the rounds of the difference, or of the quotient"""


@dataclass(frozen=True)
class Round:
    """What one way took. times in milliseconds, throughput in tokens a second."""

    throughput: float
    ttft_ms: float
    tbt_ms: float

    @classmethod
    def of(cls, found: dict[str, Any]) -> Round:
        return cls(found["tokens"] / found["seconds"], median(found["ttft_ms"]), median(found["tbt_ms"]))


@dataclass(frozen=True)
class Plan:
    """streams at once, tokens of a prompt and of an answer, rounds after a first one that does not count."""

    streams: int = 16
    n_prompt: int = 32
    n_gen: int = 64
    rounds: int = 5


@with_groups
def server_overhead(
    model: opt.Model,
    streams: Annotated[
        int, opt.measurement("-npl", "--n-parallel", metavar="N", parser=opt.whole(1), help="Streams at once.")
    ] = 16,
    n_prompt: Annotated[
        int, opt.measurement("-npp", "--n-prompt", metavar="N", parser=opt.whole(1), help="Tokens of a prompt.")
    ] = 32,
    n_gen: Annotated[
        int, opt.measurement("-ntg", "--n-gen", metavar="N", parser=opt.whole(3), help="Tokens of an answer.")
    ] = 64,
    rounds: Annotated[
        int, opt.measurement("-r", "--rounds", metavar="N", parser=opt.whole(1), help="Both ways, after a warm-up.")
    ] = 5,
    loading: LoadingToAnswer = LoadingToAnswer(),
) -> None:
    """What HTTP adds: throughput, TTFT and TBT of the server against those of its engine."""
    from llmcl.serve.run import Server, listen
    from llmcl.serve.served import Served
    from llmcl.serve.service import Service
    from llmcl.serve.settings import Settings

    plan = Plan(streams, n_prompt, n_gen, rounds)
    with (
        load_to_answer(model, loading, quiet=False) as llm,
        llm.engine(max_sequences=streams, max_context=n_prompt + n_gen + 1) as engine,
    ):
        assert llm.tokenizer is not None
        service = Service(Settings(max_sequences=streams, quiet=True))

        sizes = engine.max_context, llm.config.vocab_size
        made = Served(engine, llm.tokenizer, "model", *sizes, int(time.time()), llm.grammars)
        service.ready(made)
        listening, server = listen("127.0.0.1", 0), Server(service)
        thread = Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            ends = sorted(llm.tokenizer.eos_token_ids)
            pairs = measure(engine, url, llm.config.vocab_size, ends, plan, lambda text: print(text, file=sys.stderr))
        finally:
            service.stop()
            thread.join()
    print(table(pairs), end="")


def measure(
    engine: Engine, url: str, vocab_size: int, ends: list[int], plan: Plan, note: Callable[[str], None]
) -> list[tuple[Round, Round]]:
    """(engine, HTTP) of each round. url: of a server in front of that engine. ends: tokens that are not to come.

    All prompts differ: nothing is found in the prefix cache.
    """
    rng = np.random.default_rng(0)
    allowed = np.setdiff1d(np.arange(vocab_size), ends)
    options = {"max_tokens": plan.n_gen, "temperature": 0.0}
    pairs = []
    for number in range(plan.rounds + 1):
        prompts = [[int(i) for i in rng.choice(allowed, plan.n_prompt)] for _ in range(2 * plan.streams)]
        direct = asyncio.run(
            _direct(engine, prompts[: plan.streams], {**options, "logit_bias": dict.fromkeys(ends, NEVER)})
        )
        bias = {str(token): NEVER for token in ends}
        bodies = [
            {"prompt": p, **options, "logit_bias": bias, "stream": True, "stream_options": {"include_usage": True}}
            for p in prompts[plan.streams :]
        ]
        pairs.append((Round.of(direct), Round.of(_through_http(url, bodies))))
        note(f"round {number} of {plan.rounds}: throughput of HTTP {_ratio(pairs[-1]):.3f} of the engine's")
    return pairs[1:]


async def _direct(engine: Engine, prompts: list[list[int]], options: dict[str, Any]) -> dict[str, Any]:
    """All streams of the engine in one event loop, as a server has them."""

    async def one(prompt: list[int]) -> list[float]:
        times = [time.perf_counter()]
        async for _ in engine.stream(prompt, **options):
            times.append(time.perf_counter())
        return times

    start = time.perf_counter()
    streams = await asyncio.gather(*map(one, prompts))
    return {
        "seconds": max(times[-1] for times in streams) - start,
        "tokens": sum(len(times) - 1 for times in streams),
        "ttft_ms": [1e3 * (times[1] - times[0]) for times in streams],
        "tbt_ms": [1e3 * (b - a) for times in streams for a, b in pairwise(times[1:])],
    }


def _through_http(url: str, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    asked = json.dumps({"url": url, "bodies": bodies})
    done = subprocess.run([sys.executable, str(CLIENT)], input=asked, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the client failed: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _ratio(pair: tuple[Round, Round]) -> float:
    direct, http = pair
    return http.throughput / direct.throughput


def table(pairs: list[tuple[Round, Round]]) -> str:
    """Markdown: medians of both ways, and what HTTP adds."""

    def row(name: str, value: Callable[[Round], float], digits: int, added: str) -> str:
        sides = (f"{median(value(pair[side]) for pair in pairs):.{digits}f}" for side in (0, 1))
        return f"| {name} | {' | '.join(sides)} | {added} |\n"

    ttft = median(http.ttft_ms - direct.ttft_ms for direct, http in pairs)
    tbt = median(http.tbt_ms - direct.tbt_ms for direct, http in pairs)
    return (
        "| | engine | HTTP | added |\n|---|---:|---:|---:|\n"
        + row("throughput, tokens/s", lambda r: r.throughput, 1, f"{median(map(_ratio, pairs)):.3f}x")
        + row("TTFT p50, ms", lambda r: r.ttft_ms, 2, f"{ttft:+.2f}")
        + row("TBT p50, ms", lambda r: r.tbt_ms, 3, f"{tbt:+.3f}")
    )


if __name__ == "__main__":
    run_script(server_overhead, EPILOG)

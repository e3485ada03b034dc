#!/usr/bin/env python
"""Measures what HTTP adds to an engine: the same requests to the engine itself and to a server of it, in turns.

A round is engine, HTTP, HTTP, engine: two neighbours each, of which either comes first once. So what else the machine
does, and what it does more of from minute to minute, meets both alike.
"""

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
from made_vocabulary import made_tokenizer

from llmcl.cli import options as opt
from llmcl.cli.command import run_script
from llmcl.cli.loading import load_model
from llmcl.cli.option_groups import LoadingOrRandom, with_groups
from llmcl.engine.engine import Engine

CLIENT = Path(__file__).with_name("server_overhead_client.py")
NEVER = -100.0  # added to the logits of tokens that end answers

EPILOG = """\b
throughput  tokens a second of all streams together, from the first request to the last token
TTFT, TBT   medians over all streams; of HTTP on the client's clock, in a process of its own
event loop  processor time of the thread that has it, in the server and without one
clients     processor time of all of them
added       the median over neighbours of the difference, or of the quotient, and its quartiles"""


@dataclass(frozen=True)
class Turn:
    """What one way took. times in milliseconds, throughput in tokens a second. loop_us, client_us: processor time of
    the event loop and of the clients, in microseconds a token.
    """

    throughput: float
    ttft_ms: float
    tbt_ms: float
    loop_us: float = 0.0
    client_us: float = 0.0

    @classmethod
    def of(cls, found: dict[str, Any], loop_s: float) -> Turn:
        tokens = found["tokens"]
        times = median(found["ttft_ms"]), median(found["tbt_ms"])
        return cls(tokens / found["seconds"], *times, 1e6 * loop_s / tokens, 1e6 * found.get("cpu_s", 0.0) / tokens)


@dataclass(frozen=True)
class Plan:
    """streams at once, tokens of a prompt and of an answer, rounds after a first pair that does not count."""

    streams: int = 16
    n_prompt: int = 32
    n_gen: int = 64
    rounds: int = 5


@with_groups
def server_overhead(
    model: opt.OptionalModel = None,
    random: opt.RandomShape = None,
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
        int, opt.measurement("-r", "--rounds", metavar="N", parser=opt.whole(1), help="Both ways, twice each.")
    ] = 5,
    loading: LoadingOrRandom = LoadingOrRandom(),
) -> None:
    """What HTTP adds: throughput, TTFT and TBT of the server against those of its engine."""
    from llmcl.serve.run import Server, listen
    from llmcl.serve.served import Served
    from llmcl.serve.service import Service
    from llmcl.serve.settings import Settings

    opt.check_model_or_random(model, random, loading.quantize)
    plan, context = Plan(streams, n_prompt, n_gen, rounds), n_prompt + n_gen + 1
    with (
        load_model(model, loading, random=random, ctx_size=context, quiet=False) as llm,
        llm.engine(max_sequences=streams, max_context=context) as engine,
    ):
        if not llm.has_tokenizer:
            llm.tokenizer = made_tokenizer(llm.config.vocab_size)
        service = Service(Settings(max_sequences=streams, quiet=True))

        sizes = engine.max_context, llm.config.vocab_size
        made = Served(engine, llm.tokenizer, "model", *sizes, int(time.time()), llm.grammars)
        service.ready(made)
        listening, server = listen("127.0.0.1", 0), Server(service)
        thread = Thread(target=server.run, args=(listening,), daemon=True)
        thread.start()
        try:
            url = f"http://127.0.0.1:{listening[0].getsockname()[1]}"
            ends = sorted(llm.tokenizer.eos_token_ids)
            clock = time.pthread_getcpuclockid(thread.ident or 0)
            pairs = measure(
                engine,
                url,
                llm.config.vocab_size,
                ends,
                plan,
                lambda text: print(text, file=sys.stderr),
                lambda: time.clock_gettime(clock),
            )
        finally:
            service.stop()
            thread.join()
    print(table(pairs), end="")


def measure(
    engine: Engine,
    url: str,
    vocab_size: int,
    ends: list[int],
    plan: Plan,
    note: Callable[[str], None],
    loop_s: Callable[[], float],
) -> list[tuple[Turn, Turn]]:
    """(engine, HTTP) of neighbours, two of each round. url: of a server in front of that engine. ends: tokens that are
    not to come. loop_s: processor time of the server's event loop so far.

    All prompts differ: nothing is found in the prefix cache.
    """
    rng = np.random.default_rng(0)
    allowed = np.setdiff1d(np.arange(vocab_size), ends)
    options = {"max_tokens": plan.n_gen, "temperature": 0.0}

    def prompts() -> list[list[int]]:
        return [[int(i) for i in rng.choice(allowed, plan.n_prompt)] for _ in range(plan.streams)]

    def direct() -> Turn:
        bias, before = dict.fromkeys(ends, NEVER), time.thread_time()
        found = asyncio.run(_direct(engine, prompts(), {**options, "logit_bias": bias}))
        return Turn.of(found, time.thread_time() - before)

    def http() -> Turn:
        more = {"logit_bias": {str(token): NEVER for token in ends}, "stream_options": {"include_usage": True}}
        bodies, before = [{"prompt": prompt, **options, **more, "stream": True} for prompt in prompts()], loop_s()
        found = client.ask(bodies)
        return Turn.of(found, loop_s() - before)

    pairs = []
    with Client(url) as client:
        for number in range(1 + 2 * plan.rounds):
            if number % 2:
                pair = direct(), http()
            else:
                after = http()
                pair = direct(), after
            pairs.append(pair)
            note(f"{number} of {2 * plan.rounds}: throughput of HTTP {_ratio(pair):.3f} of the engine's")
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


class Client:
    """The process that asks the server; it is there before the first request."""

    def __init__(self, url: str):
        self._url = url
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, str(CLIENT)], stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def ask(self, bodies: list[dict[str, Any]]) -> dict[str, Any]:
        """What its head says of it. Raises SystemExit where it fails."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"url": self._url, "bodies": bodies}) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"the client failed: {self._process.communicate()[1].strip()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()


def _ratio(pair: tuple[Turn, Turn]) -> float:
    direct, http = pair
    return http.throughput / direct.throughput


def table(pairs: list[tuple[Turn, Turn]]) -> str:
    """Markdown: medians of both ways, and what HTTP adds."""

    def row(name: str, value: Callable[[Turn], float], digits: int, more: str) -> str:
        sides = (f"{median(value(pair[side]) for pair in pairs):.{digits}f}" for side in (0, 1))
        return f"| {name} | {' | '.join(sides)} | {more} |\n"

    def added(values: list[float], digits: int, unit: str = "") -> str:
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
        sign = "" if unit else "+"
        return f"{middle:{sign}.{digits}f}{unit} ({low:{sign}.{digits}f} to {high:{sign}.{digits}f})"

    ttft = added([http.ttft_ms - direct.ttft_ms for direct, http in pairs], 2)
    tbt = added([http.tbt_ms - direct.tbt_ms for direct, http in pairs], 3)
    loop = added([http.loop_us - direct.loop_us for direct, http in pairs], 1)
    clients = added([http.client_us - direct.client_us for direct, http in pairs], 1)
    return (
        "| | engine | HTTP | added (quartiles) |\n|---|---:|---:|---:|\n"
        + row("throughput, tokens/s", lambda turn: turn.throughput, 1, added([*map(_ratio, pairs)], 3, "x"))
        + row("TTFT p50, ms", lambda turn: turn.ttft_ms, 2, ttft)
        + row("TBT p50, ms", lambda turn: turn.tbt_ms, 3, tbt)
        + row("event loop, us/token", lambda turn: turn.loop_us, 1, loop)
        + row("clients, us/token", lambda turn: turn.client_us, 1, clients)
    )


if __name__ == "__main__":
    run_script(server_overhead, EPILOG)

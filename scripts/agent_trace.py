#!/usr/bin/env python
"""Replays the requests of an agent's hour against a server with OpenAI's API, for example llmcl serve or llama-server.

A conversation grows turn by turn, from 10 000 to 30 000 tokens in 30 turns. It begins with a system prompt full of
tools, whose first line changes every ten turns. Two side requests go with each turn: one beside the answer, one after
it. Every fifth turn, the user stops the request, while the prompt is read or during the answer, and asks for something
else. Texts are made of common words, so that one word is about one token.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from statistics import mean, median
from threading import Thread
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from llmcl.cli import options as opt
from llmcl.cli.command import run_script
from llmcl.cli.text_files import check_writable
from llmcl.errors import ServerError, UsageError, one_line
from llmcl.tools import markdown
from llmcl.tools.benchmark import check_plot
from llmcl.tools.rows import FORMATS, write_rows

FIRST_TOKENS, LAST_TOKENS, ANSWER_TOKENS, SIDE_TOKENS = 10_000, 30_000, 120, 12
LINE_TURNS, CANCEL_TURNS = 10, 5  # every so often the first line changes, and the user stops a request
READING_S = 0.02  # a request that is stopped while its prompt is read lives this long
TIMEOUT_S = 600
TEXT = (
    "the of and to in is that for it was on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over"
)
WORDS = TEXT.split()

EPILOG = """\b
new      tokens of the prompt that no request before had in this place
TTFT     time to the first token
alone    TTFT of a prompt with the new tokens only, measured before and after the turn
ratio    TTFT over `alone`
seconds  time of the whole turn with its side requests"""

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Answer:
    """A whole answer: its text, the server's counts, and when the first token came."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    ttft_ms: float


@dataclass(frozen=True)
class Turn:
    """What a turn of the trace took."""

    turn: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    ttft_ms: float
    alone_ms: float
    ratio: float
    seconds: float
    what: str  # "", or what is special about the turn


class Client:
    """Asks a server. url: such as http://127.0.0.1:8080. Raises UsageError for another one."""

    def __init__(self, url: str, model: str = "any"):
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(f"URL is {url}; expected an address such as http://127.0.0.1:8080")
        self._host, self._model = parts.netloc, model
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"

    def ask(
        self,
        messages: Messages,
        max_tokens: int,
        on_first: Callable[[], None] = lambda: None,
        *,
        stop_after: int | None = None,
    ) -> Answer | None:
        """Returns the whole answer. stop_after: the client hangs up after so many events with text, and None is
        returned; 0: while the prompt is read. Raises ServerError.
        """
        body = {"model": self._model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        begun, first, texts, usage = time.perf_counter(), None, list[str](), dict[str, Any]()
        try:
            with closing(HTTPConnection(self._host, timeout=TIMEOUT_S)) as connection:
                connection.request("POST", self._path, json.dumps(body), {"content-type": "application/json"})
                if stop_after == 0:
                    time.sleep(READING_S)
                    return None
                for event in _events(connection):
                    usage = event.get("usage") or usage
                    for choice in event.get("choices") or ():
                        delta = choice.get("delta") or {}
                        if text := delta.get("content") or delta.get("reasoning_content"):
                            texts.append(text)
                        # The tokens of an answer may be half a character or special: then its end is all that shows.
                        if first is None and (text or choice.get("finish_reason")):
                            first = time.perf_counter()
                            on_first()
                    if stop_after is not None and len(texts) >= stop_after:
                        return None
        except (OSError, HTTPException, ValueError) as error:
            raise ServerError(f"http://{self._host} cannot be used ({one_line(str(error))})") from error
        if first is None or "prompt_tokens" not in usage:
            raise ServerError(f"http://{self._host} gave no end of an answer, or no usage; expected both")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        ms = 1e3 * (first - begun)
        return Answer("".join(texts), usage["prompt_tokens"], cached, usage["completion_tokens"], ms)


def _events(connection: HTTPConnection) -> Iterator[dict[str, Any]]:
    answer = connection.getresponse()
    if answer.status != 200:
        raise ValueError(f"status {answer.status}: {answer.read(500).decode('utf-8', 'replace')}")
    while line := answer.readline():
        if line.startswith(b"data: {"):
            event: dict[str, Any] = json.loads(line[6:])
            if "error" in event:
                raise ValueError(str(event["error"]))
            yield event


def replay(client: Client, turns: int, scale: float, note: Callable[[Turn], None] = lambda turn: None) -> list[Turn]:
    """Runs the trace. scale: multiplies all numbers of tokens. note: gets each turn when it is over."""
    rng, measured = random.Random(0), list[Turn]()
    n_first, n_answer = int(FIRST_TOKENS * scale), max(4, int(ANSWER_TOKENS * scale))
    growth = int((LAST_TOKENS - FIRST_TOKENS) * scale / max(1, turns - 1))
    tools = _text(rng, n_first)
    messages: Messages = []
    held = 0  # tokens that the next prompt shares with the last one and its answer
    for number in range(turns):
        line = number // LINE_TURNS
        changed = number > 0 and number % LINE_TURNS == 0
        system = {"role": "system", "content": f"It is {9 + line} o'clock.\nTools:\n{tools}"}
        stopped = number % CANCEL_TURNS == CANCEL_TURNS - 1
        alone = _alone(client, rng, growth if held and not changed else held or n_first)
        begun = time.perf_counter()
        if stopped:
            unwanted = {"role": "user", "content": _text(rng, growth)}
            reading = number // CANCEL_TURNS % 2 == 0
            client.ask([system, *messages, unwanted], n_answer, stop_after=0 if reading else 2)
        messages.append({"role": "user", "content": _text(rng, max(8, growth - n_answer))})
        title = _side("Write a title of five words.", messages[-1:])
        topic = _side("Say whether the last message begins another topic.", messages[-3:])
        beside = Thread(target=client.ask, args=(title, SIDE_TOKENS), daemon=True)
        answer = _whole(client.ask([system, *messages], n_answer, beside.start))
        beside.join()
        client.ask(topic, SIDE_TOKENS)
        seconds = time.perf_counter() - begun
        n_new = answer.prompt_tokens - (0 if changed else held)
        alone_ms = mean([alone, _alone(client, rng, n_new)]) * n_new
        what = "first line changed" if changed else "after a stopped request" if stopped else ""
        times = answer.ttft_ms, alone_ms, answer.ttft_ms / alone_ms, seconds
        measured.append(Turn(number + 1, answer.prompt_tokens, answer.cached_tokens, n_new, *times, what))
        note(measured[-1])
        messages.append({"role": "assistant", "content": answer.text})
        held = answer.prompt_tokens + answer.generated_tokens
    return measured


def _text(rng: random.Random, n_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(max(1, n_words)))


def _alone(client: Client, rng: random.Random, n_tokens: int) -> float:
    """Returns the milliseconds per token of a prompt with about n_tokens tokens that no other prompt begins with."""
    answer = _whole(client.ask([{"role": "user", "content": _text(rng, n_tokens)}], 1))
    return answer.ttft_ms / (answer.prompt_tokens - answer.cached_tokens)


def _side(task: str, messages: Messages) -> Messages:
    text = "\n".join(message["content"] for message in messages)
    return [{"role": "system", "content": task}, {"role": "user", "content": text}]


def _whole(answer: Answer | None) -> Answer:
    assert answer is not None  # nobody stopped it
    return answer


def table(turns: list[Turn]) -> str:
    """Markdown: a line for each turn, and the sums."""
    header = ["turn", "prompt", "cached", "new", "TTFT, ms", "alone, ms", "ratio", "seconds", ""]
    rows = [
        [
            *(f"{n}" for n in (turn.turn, turn.prompt_tokens, turn.cached_tokens, turn.new_tokens)),
            *(f"{turn.ttft_ms:.0f}", f"{turn.alone_ms:.0f}", f"{turn.ratio:.2f}", f"{turn.seconds:.2f}", turn.what),
        ]
        for turn in turns
    ]
    n_prompt, n_cached = sum(turn.prompt_tokens for turn in turns), sum(turn.cached_tokens for turn in turns)
    end = (
        f"{sum(turn.seconds for turn in turns):.1f} s, {n_cached / n_prompt:.0%} of the prompts' tokens cached, "
        f"median ratio {median(turn.ratio for turn in turns):.2f}"
    )
    return "\n".join([*markdown.table("rrrrrrrrl", header, rows), "", end, ""])


def draw(turns: list[Turn], path: str) -> None:
    """Draws TTFT and `alone` by turn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3.5))
    numbers = [turn.turn for turn in turns]
    axis.plot(numbers, [turn.ttft_ms for turn in turns], "o-", color="#0969da", label="turn")
    axis.plot(numbers, [turn.alone_ms for turn in turns], "s--", color="#8c959f", label="the new tokens alone")
    axis.set(xlabel="turn", ylabel="TTFT, ms", ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def agent_trace(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, such as http://127.0.0.1:8080.")],
    turns: Annotated[
        int, opt.measurement("--turns", metavar="N", parser=opt.whole(1), help="Turns of the conversation.")
    ] = 30,
    scale: Annotated[
        float,
        opt.measurement(
            "--scale",
            metavar="S",
            parser=opt.number(float, "a number above 0", lambda scale: scale > 0),
            help="Multiplies the tokens of all texts: 0.1 ends at 3000.",
        ),
    ] = 1.0,
    model: Annotated[str, opt.measurement("--model", metavar="NAME", help="Model name in requests.")] = "any",
    format: Annotated[
        str, opt.choice(opt.OUTPUT_PANEL, "--format", FORMATS, env=False, help="How the rows are written.")
    ] = "md",
    output: opt.RowsFile = None,
    plot: Annotated[str | None, opt.plot("the times to first tokens over the turns")] = None,
) -> None:
    """Replay an agent's hour against a server: TTFT and cached tokens of each turn."""
    check_writable("-o/--output", output)
    if plot is not None:
        check_plot(plot)
    show = partial(print, file=sys.stderr, flush=True)
    measured = replay(
        Client(url, model), turns, scale, lambda turn: show(f"turn {turn.turn} of {turns}: {turn.ttft_ms:.0f} ms")
    )
    write_rows(measured, format, output, lambda rows: table([*rows]))
    if plot is not None:
        draw(measured, plot)


if __name__ == "__main__":
    run_script(agent_trace, EPILOG)

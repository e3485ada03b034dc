"""Runs the engine on the answers of a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llmcl.serve.served import Answer, Ask, Served, Stream

if TYPE_CHECKING:
    from llmcl.engine.generation import Piece

Take = Callable[[Answer, "Piece"], None]
"""What is called with each piece of an answer."""


class Streams:
    """Runs the engine on all answers. Entering this async context starts them; leaving ends them."""

    def __init__(self, served: Served, answers: Sequence[Answer]):
        self._served, self._answers = served, answers
        self._begun: list[tuple[Answer, Stream]] = []

    async def __aenter__(self) -> Streams:
        try:
            for answer in self._answers:
                if answer.ask.needs_engine:
                    self._begun.append((answer, _stream_of(self._served, answer.ask)))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        for _, stream in self._begun:
            await stream.aclose()

    def progress(self) -> list[tuple[Answer, int, int]]:
        """Returns for each answer how many prompt tokens were cached and how many were read."""
        return [(answer, *stream.progress()) for answer, stream in self._begun]

    async def pass_on(self, take: Take, after: Callable[[], None]) -> None:
        """Calls `take` with each piece as it comes, already added to the answer, and `after` once per batch of pieces.
        Returns after the last piece.
        """
        if len(self._begun) == 1:  # the common case; no task is needed
            ((answer, stream),) = self._begun
            await self._pass_on(answer, stream, take, after)
            return
        passing = [asyncio.ensure_future(self._pass_on(*begun, take, after)) for begun in self._begun]
        try:
            await asyncio.gather(*passing)
        finally:
            for task in passing:
                task.cancel()
            await asyncio.gather(*passing, return_exceptions=True)

    async def _pass_on(self, answer: Answer, stream: Stream, take: Take, after: Callable[[], None]) -> None:
        """Passes on one answer. When the thought budget is spent, a second request continues after the end of the
        thoughts.
        """
        try:
            await stream.pass_on(_adding(answer, take, self._served.max_context), after)
            return
        except _TimeSpentError:
            answer.cached_tokens = stream.progress()[0]
            await stream.aclose()
            after()
            return
        except _BudgetSpentError:
            start = time.perf_counter()
        await stream.aclose()
        rest = _stream_of(self._served, answer.end_thoughts(stream.progress()[0]))
        self._begun.append((answer, rest))
        await rest.pass_on(_adding(answer, take, self._served.max_context, start), after)


class _BudgetSpentError(Exception):
    """The model has used the thought budget."""


class _TimeSpentError(Exception):
    """The answer has taken as long as it may."""


def _stream_of(served: Served, ask: Ask) -> Stream:
    options = ask.options | ({} if ask.prompt_logprobs is None else {"prompt_logprobs": ask.prompt_logprobs})
    if ask.images:
        options["images"] = ask.images
    # With max_tokens 0 the engine still makes one token, which carries the prompt's log-probabilities.
    return served.engine.stream(ask.prompt, max_tokens=max(1, ask.max_tokens), stop=ask.stop, **options)


def _adding(answer: Answer, take: Take, max_context: int, start: float | None = None) -> Callable[[Piece], None]:
    """Returns a function that adds a piece to the answer. start: when the first request stopped, if a second request
    continues the answer; the second request's first token is not the answer's first.
    """

    first = 0.0

    def add(piece: Piece) -> None:
        nonlocal first
        now, limit = time.perf_counter(), answer.ask.line_s
        first = first or now
        is_late = limit is not None and now - first > limit and "\n" in answer.text + piece.text
        is_late &= piece.finish_reason is None
        if is_late:
            piece = replace(piece, finish_reason="length")
        if start is not None and piece.tbt_ms is None:
            piece = replace(piece, tbt_ms=(time.perf_counter() - start) * 1e3)
        if not answer.ask.max_tokens:
            piece = replace(piece, text="", logprob=None, finish_reason="length")
        answer.add(piece)
        take(answer, piece)
        if is_late:
            raise _TimeSpentError
        if answer.is_over_budget(max_context):
            raise _BudgetSpentError

    return add

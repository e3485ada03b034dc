"""Pieces that are passed on to a function, from the event loop itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_batch import FakeBatch, FakeLLM

from llmcl.engine.engine import Engine
from llmcl.engine.generation import Piece
from llmcl.errors import DeviceError, UsageError

OPTIONS: dict[str, Any] = {"max_tokens": 30, "seed": 7, "temperature": 1.0, "ignore_eos": True}
TIMEOUT_S = 60


@pytest.fixture
def batch() -> FakeBatch:
    return FakeBatch(n_pages=40, max_sequences=4)


@pytest.fixture
def engine(batch: FakeBatch) -> Iterator[Engine]:
    with Engine(FakeLLM(), lambda: batch, 64, wait=False) as engine:  # type: ignore[arg-type]
        yield engine


async def passed_on(engine: Engine, prompt: Any) -> list[int]:
    pieces: list[Piece] = []
    await engine.stream(prompt, **OPTIONS).pass_on(pieces.append)
    return [piece.token_id for piece in pieces]


async def nothing_left(batch: FakeBatch) -> None:
    end = time.monotonic() + TIMEOUT_S
    while batch.places or batch.cache.n_free < len(batch.cache.order):
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def test_they_are_those_of_a_loop(engine: Engine) -> None:
    async def work() -> None:
        prompts: list[Any] = [[1, 2, 3], "abc", [4] * 40, "d", [5, 6]]
        found = await asyncio.gather(*(passed_on(engine, prompt) for prompt in prompts))
        for prompt, ids in zip(prompts, found, strict=True):
            assert ids == [piece.token_id async for piece in engine.stream(prompt, **OPTIONS)]

    asyncio.run(work())


def test_those_that_came_meanwhile_are_passed_on_together(engine: Engine, batch: FakeBatch) -> None:
    async def work() -> None:
        groups: list[list[Piece]] = [[]]

        def take(piece: Piece) -> None:
            groups[-1].append(piece)
            if len(groups) == 1:
                wait_for(lambda: not batch.places)  # the answer ends while the loop is held up

        await engine.stream([1, 2], **OPTIONS).pass_on(take, lambda: groups.append([]))
        assert max(map(len, groups)) > 10 and sum(map(len, groups)) == 30

    asyncio.run(work())


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_an_error_of_the_function_ends_the_request(engine: Engine, batch: FakeBatch) -> None:
    batch.before = lambda what: time.sleep(0.001)

    async def work() -> None:
        taken: list[Piece] = []

        def take(piece: Piece) -> None:
            taken.append(piece)
            if len(taken) == 3:
                raise ValueError("enough")

        with pytest.raises(ValueError, match="enough"):
            await engine.stream([1, 2], **{**OPTIONS, "max_tokens": 900}).pass_on(take)
        await nothing_left(batch)
        assert len(taken) == 3

    asyncio.run(work())


def test_cancelling_ends_the_request(engine: Engine, batch: FakeBatch) -> None:
    batch.before = lambda what: time.sleep(0.001)

    async def work() -> None:
        taken: list[Piece] = []
        task = asyncio.ensure_future(engine.stream([1, 2], **{**OPTIONS, "max_tokens": 900}).pass_on(taken.append))
        while len(taken) < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        n = len(taken)
        await nothing_left(batch)
        assert len(taken) == n

    asyncio.run(work())


@pytest.mark.parametrize("how", ["cancelled elsewhere", "read before", "passed on before"])
def test_it_returns_where_no_piece_comes_any_more(how: str, engine: Engine, batch: FakeBatch) -> None:
    batch.before = lambda what: time.sleep(0.001)

    async def work() -> None:
        taken: list[Piece] = []
        many = how == "cancelled elsewhere"
        stream = engine.stream([1, 2], **{**OPTIONS, "max_tokens": 900 if many else 5})
        if how == "read before":
            assert len([piece async for piece in stream]) == 5
        elif how == "passed on before":
            await stream.pass_on(lambda piece: None)
        task = asyncio.ensure_future(stream.pass_on(taken.append))
        while many and len(taken) < 3:
            await asyncio.sleep(0.001)
        await stream.aclose()
        await asyncio.wait_for(task, TIMEOUT_S)
        n = len(taken)
        await nothing_left(batch)
        assert len(taken) == n < 900 and bool(n) == many

    asyncio.run(work())


def test_it_raises_what_ends_the_answer(engine: Engine, batch: FakeBatch) -> None:
    def fail(what: str) -> None:
        if what == "decode":
            raise DeviceError("it broke")

    batch.before = fail

    async def work() -> None:
        taken: list[Piece] = []
        with pytest.raises(DeviceError, match="it broke"):
            await engine.stream([1, 2], **OPTIONS).pass_on(taken.append)
        assert len(taken) == 1
        engine.close()
        with pytest.raises(UsageError, match="closed"):
            await engine.stream("ab", **OPTIONS).pass_on(taken.append)

    asyncio.run(work())

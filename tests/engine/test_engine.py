"""The engine over a batch without a device: from threads and tasks, cancelled, closed, and with a device that fails."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import ref

import numpy as np
import pytest
from fake_batch import VOCAB, FakeBatch, FakeLLM, answer_of

from llmcl.engine.engine import Engine
from llmcl.engine.generation import Piece
from llmcl.engine.prompts import are_prompts
from llmcl.engine.step_loop import StepLoop
from llmcl.errors import ContextLengthError, DeviceError, OutOfDeviceMemoryError, UsageError
from llmcl.ops.sample import SamplingParams

TIMEOUT_S = 60


class Opened:
    """An engine on a fake batch. `steps`: how many steps it may take, where that is to be counted."""

    def __init__(self, n_pages: int = 40, max_sequences: int = 4, *, counted: bool = False, **sizes: Any):
        self.batch = FakeBatch(n_pages, max_sequences, **sizes)
        self.llm = FakeLLM()
        self.steps = threading.Semaphore(0)
        self.n_steps = 0
        if counted:
            self.batch.before = self._wait_for_a_step
        batch, llm = self.batch, self.llm
        self.engine = Engine(llm, lambda: batch, 64, wait=False)  # type: ignore[arg-type]

    def _wait_for_a_step(self, what: str) -> None:
        if what == "decode":
            assert self.steps.acquire(timeout=TIMEOUT_S)
            self.n_steps += 1

    def is_closing(self) -> bool:
        """Whether `close` waits for the step."""
        return self.engine._worker._stopped

    def take(self, n: int) -> None:
        """Lets n steps begin, and waits until the last of them has."""
        wanted = self.n_steps + n
        for _ in range(n):
            self.steps.release()
        until(lambda: self.n_steps == wanted)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture(params=[False, True], ids=["in step", "runs ahead"])
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    opened = Opened(runs_ahead=request.param)
    with opened.engine:
        yield opened


@pytest.fixture(params=[False, True], ids=["in step", "runs ahead"])
def counted(request: pytest.FixtureRequest) -> Iterator[Opened]:
    opened = Opened(runs_ahead=request.param, counted=True)
    try:
        yield opened
    finally:
        opened.steps.release(100000)
        opened.engine.close()


def prompt(seed: int, n: int = 20) -> list[int]:
    return [(seed * 31 + i * i) % VOCAB for i in range(n)]


def expected(seed: int, n_tokens: int, n: int = 20) -> list[int]:
    return answer_of(prompt(seed, n), SamplingParams(seed=seed), n_tokens)


def options(seed: int, n_tokens: int) -> dict[str, Any]:
    return {"max_tokens": n_tokens, "seed": seed, "temperature": 1.0, "ignore_eos": True}


# ---- answers -----------------------------------------------------------------------------------------------------


def test_answers_come_in_the_order_of_the_prompts(opened: Opened) -> None:
    prompts = [prompt(7, 10 * n + 1) for n in range(9)]
    answers = opened.engine.generate(prompts, **options(7, 30))
    assert [answer.token_ids for answer in answers] == [
        answer_of(asked, SamplingParams(seed=7), 30) for asked in prompts
    ]
    assert [answer.prompt_token_ids for answer in answers] == prompts
    assert {answer.finish_reason for answer in answers} == {"length"}


def test_many_threads_and_tasks_get_what_each_would_get_alone(opened: Opened) -> None:
    def in_a_thread(seed: int) -> list[int]:
        return [piece.token_id for piece in opened.engine.submit(prompt(seed), **options(seed, 40))]

    async def in_a_task(seed: int) -> list[int]:
        return [piece.token_id async for piece in opened.engine.stream(prompt(seed), **options(seed, 40))]

    async def tasks() -> list[list[int]]:
        return await asyncio.gather(*(in_a_task(seed) for seed in range(12)))

    with ThreadPoolExecutor(8) as pool:
        threads = [pool.submit(in_a_thread, seed) for seed in range(12)]
        assert asyncio.run(tasks()) == [expected(seed, 40) for seed in range(12)]
        assert [thread.result(TIMEOUT_S) for thread in threads] == [expected(seed, 40) for seed in range(12)]


def test_pieces_have_log_probabilities_where_they_are_asked_for(opened: Opened) -> None:
    asked = opened.engine.submit(prompt(1), **options(1, 20), logprobs=2)
    other = opened.engine.submit(prompt(2), **options(2, 20))
    pieces = list(asked)
    assert [piece.logprob and piece.logprob.token for piece in pieces] == expected(1, 20)
    assert all(piece.logprob is not None and len(piece.logprob.top) == 2 for piece in pieces)
    assert all(piece.logprob is None for piece in other)


def test_the_first_piece_has_the_log_probabilities_of_the_prompt(opened: Opened) -> None:
    asked = opened.engine.submit(prompt(1, 200), **options(1, 5), prompt_logprobs=1)
    first, *others = list(asked)
    assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
    assert [found and found.token for found in first.prompt_logprobs[1:]] == prompt(1, 200)[1:]
    assert [found and found.logprob for found in first.prompt_logprobs[1:]] == [-i for i in range(1, 200)]
    assert all(piece.prompt_logprobs is None for piece in others)
    single = opened.engine.submit([5], **options(1, 2), prompt_logprobs=0)
    assert next(single).prompt_logprobs == (None,)
    for wrong in (21, -1, "3"):
        with pytest.raises(UsageError, match="expected 0 to 20 alternatives"):
            opened.engine.submit(prompt(1), prompt_logprobs=wrong)


def test_where_there_is_no_room_for_scores_one_request_ends(opened: Opened) -> None:
    def refuse(what: str) -> None:
        if what == "prepare scores":
            raise OutOfDeviceMemoryError("no room")

    opened.batch.before = refuse
    with pytest.raises(OutOfDeviceMemoryError, match="no room"):
        opened.engine.submit(prompt(1), **options(1, 5), prompt_logprobs=1).result()
    assert opened.engine.submit(prompt(1), **options(1, 5)).result().token_ids == expected(1, 5)


def test_pieces_of_a_list_come_with_the_index_of_their_prompt(opened: Opened) -> None:
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    order = []
    for i, piece in opened.engine.stream_each([prompt(3), prompt(3), prompt(4)], **options(3, 20)):
        found[i].append(piece.token_id)
        order.append(i)
    assert found[0] == found[1] == expected(3, 20)
    assert found[2] == answer_of(prompt(4), SamplingParams(seed=3), 20)
    assert order != sorted(order)


def test_text_stops_and_statistics_are_those_of_a_single_answer(opened: Opened) -> None:
    whole = opened.engine.submit(prompt(1), max_tokens=30, seed=1, temperature=1.0, ignore_eos=True).result()
    assert len(whole.text) == 30 and whole.finish_reason == "length"
    stop = whole.text[10:13]
    pieces = list(opened.engine.submit(prompt(1), max_tokens=30, seed=1, temperature=1.0, ignore_eos=True, stop=stop))
    at = whole.text.index(stop)
    assert "".join(piece.text for piece in pieces) == whole.text[:at]
    assert pieces[-1].finish_reason == "stop" and len(pieces) == at + 3
    stats = pieces[-1].stats
    assert stats is not None and (stats.prompt_tokens, stats.generated_tokens) == (20, at + 3)
    assert stats.load_ms == 5 and stats.peak_device_bytes == 7 and stats.ttft_ms is not None
    assert [piece.tbt_ms is None for piece in pieces] == [True] + [False] * (at + 2)
    until(lambda: not opened.batch.places)


def test_statistics_say_what_of_the_prompt_an_earlier_request_left(opened: Opened) -> None:
    first = opened.engine.submit(prompt(1, 150), max_tokens=2).result().stats
    again = opened.engine.submit([*prompt(1, 140), 7], max_tokens=2).result().stats
    assert (first.cached_tokens, again.cached_tokens, again.prompt_tokens) == (0, 128, 141)


def test_an_answer_ends_with_the_end_of_text_token(opened: Opened) -> None:
    seed, at = next(
        (seed, ids.index(VOCAB - 1)) for seed in range(100) if VOCAB - 1 in (ids := expected(seed, 40))[3:39]
    )
    answer = opened.engine.submit(prompt(seed), seed=seed, temperature=1.0, max_tokens=40).result()
    assert answer.token_ids == expected(seed, at + 1)
    assert answer.finish_reason == "stop" and len(answer.text) == at


def test_the_room_of_the_engine_ends_an_answer() -> None:
    with Opened(n_pages=2).engine as engine:
        assert engine.max_context == 128
        assert len(engine.submit(prompt(1, 100), **options(1, 500)).result().token_ids) == 29
        with pytest.raises(ContextLengthError, match="the prompt has 129 tokens, the engine room for 128"):
            engine.submit(prompt(1, 129))


def test_the_higher_priority_goes_first() -> None:
    opened = Opened(max_sequences=1, counted=True)
    with opened.engine as engine:
        first = engine.submit(prompt(0), **options(0, 3))
        until(lambda: bool(opened.batch.places))
        late = [engine.submit(prompt(n), priority=n, **options(n, 2)) for n in range(1, 4)]
        ended = []

        def read(n: int) -> None:
            late[n].result()
            ended.append(n)

        with ThreadPoolExecutor(3) as pool:
            reading = [pool.submit(read, n) for n in range(3)]
            for n in (2, 1, 0):
                opened.steps.release(3 if n == 2 else 1)
                until(lambda n=n: len(ended) == 3 - n)  # type: ignore[misc]
            assert all(done.result(TIMEOUT_S) is None for done in reading)
        assert ended == [2, 1, 0] and len(list(first)) == 3


# ---- who leaves --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "drop", "break", "aclose", "cancelled task"])
def test_who_leaves_frees_place_and_pages_within_a_step(how: str, counted: Opened) -> None:
    other = counted.engine.submit(prompt(1), **options(1, 200))
    counted.take(2)
    first = next(other)
    free = len(counted.batch.cache.free())

    def leave_thread() -> None:
        request = counted.engine.submit(prompt(2, 150), **options(2, 200))
        counted.take(5)
        next(request)
        if how == "cancel":
            request.cancel()
            assert list(request) == []

    async def leave_task() -> None:
        async def read() -> None:
            stream = counted.engine.stream(prompt(2, 150), **options(2, 200))
            async for _ in stream:
                if how == "break":
                    break
                if how == "aclose":
                    await stream.aclose()
                    assert [piece async for piece in stream] == []

        task = asyncio.create_task(read())
        while len(counted.batch.places) < 2:
            await asyncio.sleep(0.001)
            if counted.steps._value == 0:
                counted.steps.release()
        for _ in range(4):
            counted.steps.release()
            await asyncio.sleep(0.01)
        if how == "cancelled task":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await task

    leave_thread() if how in ("cancel", "drop") else asyncio.run(leave_task())
    before = counted.n_steps
    counted.steps.release()
    until(lambda: counted.n_steps > before)
    counted.take(2)  # of these the first may have been planned before
    assert len(counted.batch.places) == 1
    assert len(counted.batch.cache.free()) >= free - 1
    counted.steps.release(1000)
    assert [piece.token_id for piece in (first, *other)] == expected(1, 200)


def test_one_cancelled_while_it_waits_never_begins(counted: Opened) -> None:
    running = [counted.engine.submit(prompt(n), **options(n, 20)) for n in range(4)]
    waiting = counted.engine.submit(prompt(9), **options(9, 20))
    waiting.cancel()
    counted.steps.release(1000)
    assert [[piece.token_id for piece in request] for request in running] == [expected(n, 20) for n in range(4)]
    assert list(waiting) == [] and counted.batch.n_prefilled == 80
    with pytest.raises(UsageError, match="ended before its last token"):
        waiting.result()


def test_a_result_is_the_whole_answer_or_none(counted: Opened) -> None:
    """With a piece read before, it was the rest of the answer without a word."""
    counted.steps.release(1000)
    asked, begun, read = (counted.engine.submit(prompt(n), **options(n, 5)) for n in range(3))
    assert asked.result().token_ids == expected(0, 5) and asked.result() is asked.result()
    assert next(begun).token_id == expected(1, 5)[0]
    assert [piece.token_id for piece in read] == expected(2, 5)
    for request in begun, read:
        with pytest.raises(UsageError, match="pieces of the answer were read already"):
            request.result()
    assert [piece.token_id for piece in begun] == expected(1, 5)[1:]


# ---- what goes wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_all_who_read_a_request_meet_its_end(fails: bool, counted: Opened) -> None:
    """Each piece goes to one of them. Who waited while another met the end waited for ever."""
    how: dict[str, Any] = {"regex": "every other 1"} if fails else {"ignore_eos": True}
    request = counted.engine.submit(prompt(1), max_tokens=3, **how)

    found: list[int] = []

    def read() -> None:
        n = 0
        try:
            for _ in request:
                n += 1
        except UsageError:
            assert fails
        found.append(n)

    for _ in range(3):
        threading.Thread(target=read, daemon=True).start()
    counted.steps.release(1000)
    until(lambda: len(found) == 3)
    assert sum(found) == (1 if fails else 3)

    async def tasks() -> None:
        request = counted.engine.submit(prompt(1), max_tokens=3, ignore_eos=True)

        async def read() -> int:
            return len([piece async for piece in request])

        assert sum(await asyncio.wait_for(asyncio.gather(read(), read(), read()), TIMEOUT_S)) == 3

    asyncio.run(tasks())


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="POSIX only")
def test_an_interrupted_close_waits_for_the_step() -> None:
    opened, running, interrupted = Opened(), threading.Event(), threading.Event()
    ended = False

    def slow(what: str) -> None:
        nonlocal ended
        if what == "decode" and not running.is_set():
            running.set()
            assert interrupted.wait(TIMEOUT_S)
            time.sleep(0.1)
            ended = True

    def interrupt(thread: int) -> None:
        until(opened.is_closing)
        time.sleep(0.05)
        signal.pthread_kill(thread, signal.SIGINT)
        interrupted.set()

    opened.batch.before = slow
    request = opened.engine.submit(prompt(1), max_tokens=9, ignore_eos=True)
    assert running.wait(TIMEOUT_S)
    main = threading.main_thread().ident
    assert main is not None
    with pytest.raises(KeyboardInterrupt):
        threading.Thread(target=interrupt, args=(main,)).start()
        opened.engine.close()
    assert ended
    with pytest.raises(UsageError, match="closed"):
        request.result()


def test_a_bad_request_is_the_error_of_its_caller_alone(opened: Opened) -> None:
    good = opened.engine.submit(prompt(1), **options(1, 100))
    for bad, error, match in (
        ({"prompt": []}, UsageError, "no tokens"),
        ({"prompt": prompt(1, 2000)}, ContextLengthError, "2000 tokens, the engine room for 1024"),
        ({"prompt": prompt(1), "max_tokens": 0}, UsageError, "max_tokens is 0"),
        ({"prompt": prompt(1), "top_p": 2}, UsageError, "top_p is 2"),
        ({"prompt": prompt(1), "stop": ""}, UsageError, "stop string is empty"),
        ({"prompt": prompt(1), "priority": "high"}, UsageError, "priority is 'high'"),
        ({"prompt": prompt(1), "temprature": 1}, TypeError, "temprature"),
    ):
        with pytest.raises(error, match=match):
            opened.engine.submit(**bad)  # type: ignore[arg-type]
    with pytest.raises(ContextLengthError, match=r"^prompt 1: the prompt has 2000 tokens"):
        opened.engine.generate([prompt(1), prompt(2, 2000)])
    with pytest.raises(UsageError, match="expected a list of prompts"):
        opened.engine.generate("text")
    for file in (None, 5, b"x", "a\0b", "\ud800"):
        for use in (opened.engine.restore_prefixes, lambda file: opened.engine.store_prefixes(file, 1)):
            with pytest.raises(UsageError, match=r"the file of the prefix cache is .*; expected a path"):
                use(file)
    with pytest.raises(UsageError, match="max_bytes is -1; expected a whole number, 0 or more"):
        opened.engine.store_prefixes("file", -1)
    assert opened.engine.submit(prompt(1), priority=np.int64(1), **options(1, 1)).result().token_ids == expected(1, 1)

    async def streamed() -> None:
        async for _ in opened.engine.stream([]):
            raise AssertionError

    with pytest.raises(UsageError, match="no tokens"):
        asyncio.run(streamed())
    assert [piece.token_id for piece in good] == expected(1, 100)


def test_a_request_without_numbers_fails_alone(opened: Opened) -> None:
    step = opened.batch.step

    def no_number(decode: Any, chunks: Any, *_: Any) -> Callable[[], list[int]]:
        wait = step(decode, chunks)
        sequences = [*decode, *(chunk.sequence for chunk in chunks if chunk.is_last)]
        bad = [sequence.sampling.seed == 2 and sequence.n_sampled > 10 for sequence in sequences]
        return lambda: [VOCAB if is_bad else token for token, is_bad in zip(wait(), bad, strict=True)]

    opened.batch.step = no_number  # type: ignore[method-assign]
    requests = [opened.engine.submit(prompt(seed), **options(seed, 50)) for seed in (1, 2, 3)]
    with pytest.raises(DeviceError, match="no token can be chosen"):
        list(requests[1])
    assert list(requests[1]) == []
    for request, seed in ((requests[0], 1), (requests[2], 3)):
        assert [piece.token_id for piece in request] == expected(seed, 50)


@pytest.mark.parametrize("error", [OutOfDeviceMemoryError("the device broke"), ValueError("a defect")])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failing_device_reaches_all_and_whoever_comes_later(error: Exception, opened: Opened) -> None:
    steps, all_wait = 0, threading.Event()

    def fail(what: str) -> None:
        nonlocal steps
        all_wait.wait(60)  # 20 steps may take less time than the submission of six requests
        steps += 1
        if steps == 20:
            raise error

    opened.batch.before = fail
    requests = [opened.engine.submit(prompt(n), **options(n, 100)) for n in range(6)]
    all_wait.set()
    for request in requests:
        with pytest.raises(DeviceError, match=str(error)):
            list(request)
    with pytest.raises(DeviceError, match=str(error)):
        opened.engine.submit(prompt(1))
    opened.engine.close()
    with pytest.raises(UsageError, match="engine of fake was closed"):
        opened.engine.submit(prompt(1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_loop_that_failed_half_way(counted: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("a defect")

    requests = [counted.engine.submit(prompt(n), **options(n, 900)) for n in range(6)]
    counted.take(3)
    monkeypatch.setattr(StepLoop, "end", fail)
    monkeypatch.setattr(StepLoop, "step", fail)
    counted.steps.release(1000)
    for request in requests:
        with pytest.raises(DeviceError, match="the engine failed: AssertionError: a defect"):
            list(request)


# ---- open and closed ---------------------------------------------------------------------------------------------


def test_closing_ends_what_is_read_and_refuses_what_comes() -> None:
    opened = Opened(counted=True)
    requests = [opened.engine.submit(prompt(n), **options(n, 100)) for n in range(6)]
    opened.take(3)

    async def stream() -> None:
        async for _ in opened.engine.stream(prompt(1), **options(1, 100)):
            pass

    with ThreadPoolExecutor(9) as pool:
        reading = [pool.submit(list, request) for request in requests]
        reading.append(pool.submit(asyncio.run, stream()))
        time.sleep(0.05)
        closing = [pool.submit(opened.engine.close) for _ in range(2)]
        until(opened.is_closing)
        opened.steps.release(1000)
        for done in closing:
            done.result(TIMEOUT_S)
        for read in reading:
            with pytest.raises(UsageError, match="engine of fake was closed; open another one"):
                read.result(TIMEOUT_S)
    with pytest.raises(UsageError, match="was closed"):
        opened.engine.submit(prompt(1))
    opened.engine.close()


def test_while_an_engine_is_open_the_model_is_its_own() -> None:
    opened = Opened()
    leases = opened.llm.leases
    for wait in (False, True):  # it would wait for itself
        with pytest.raises(UsageError, match="an engine of fake is open"):
            leases.call(lambda: 1, wait=wait)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(UsageError, match="an engine of fake is open"):
            pool.submit(leases.call, lambda: 1).result(TIMEOUT_S)
        waiting = pool.submit(leases.call, lambda: 1, wait=True)
        assert opened.engine.submit(prompt(1), **options(1, 20)).result().token_ids == expected(1, 20)
        assert not waiting.done()
        opened.engine.close()
        assert waiting.result(TIMEOUT_S) == 1
    assert leases.call(lambda: 1) == 1
    request = Opened().engine.submit(prompt(1))  # of an engine that nobody can close any more
    with pytest.raises(UsageError, match="was closed"):
        list(request)


def test_closing_the_model_closes_its_engine() -> None:
    opened = Opened()
    opened.batch.before = lambda what: time.sleep(0.01)  # the answer is not complete before it is closed
    request = opened.engine.submit(prompt(1), **options(1, 900))
    next(request)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(opened.llm.leases.close).result(TIMEOUT_S)
    with pytest.raises(UsageError, match="was closed"):
        list(request)


def test_an_engine_that_cannot_be_opened_leaves_the_model_free() -> None:
    llm: Any = FakeLLM()

    def fails() -> Any:
        raise OutOfDeviceMemoryError("no room")

    with pytest.raises(OutOfDeviceMemoryError, match="no room"):
        Engine(llm, fails, 64, wait=False)
    with pytest.raises(UsageError, match="max_step_tokens is 3"):
        Engine(llm, lambda: FakeBatch(10, 4), 3, wait=False)
    assert llm.leases.call(lambda: 1) == 1


def test_a_closed_engine_keeps_nothing_of_the_device() -> None:
    opened = Opened()
    request = opened.engine.submit(prompt(1), **options(1, 5))
    request.result()
    batch, engine, llm = ref(opened.batch), opened.engine, ref(opened.llm)
    engine.close()
    opened.batch = None  # type: ignore[assignment]
    gc.collect()
    assert batch() is None
    del opened, engine
    gc.collect()
    assert llm() is None and request.prompt_token_ids == prompt(1)


def test_an_async_context_closes() -> None:
    async def work() -> list[Piece]:
        async with Opened().engine as engine:
            pieces = [piece async for piece in engine.stream(prompt(1), **options(1, 9))]
        with pytest.raises(UsageError, match="was closed"):
            engine.submit(prompt(1))
        return pieces

    assert [piece.token_id for piece in asyncio.run(work())] == expected(1, 9)


def test_lists_of_prompts_are_told_from_one_prompt() -> None:
    message = {"role": "user", "content": "text"}
    assert not any(map(are_prompts, ("text", [1, 2], [message], [], b"text", message, None, [None], ["text", None])))
    assert not any(map(are_prompts, (np.array([1, 2]), np.eye(2), memoryview(b"ab"), [memoryview(b"ab")], [np.eye(2)])))
    assert all(map(are_prompts, (["text"], [[1, 2], [3]], [[message], "text"], ("a", "b"), [np.array([1, 2]), [3]])))

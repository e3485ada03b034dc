"""One thing at a time: threads that share a model, answers half read, interrupts at every line."""

from __future__ import annotations

import _thread
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from helpers import random_weights, save_folder, small_config
from programs import TINY_SHAPE
from tiers import is_full

import llmcl
from llmcl.engine.leases import Leases
from llmcl.engine.llm import LLM
from llmcl.errors import UsageError
from llmcl.models.paged_kv_cache import PagedKVCache
from llmcl.runtime.device import Device
from llmcl.tools.perplexity import perplexity

BUSY = "generating in another thread.*wait=True"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PAGES = 40
GREEDY: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True}


@pytest.fixture(scope="module", params=["contiguous", "in pages"])
def llm(
    request: pytest.FixtureRequest, default_device: Device, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    """A small model that can hold conversations."""
    folder = save_folder(tmp_path_factory.mktemp("small"), small_config(), random_weights(small_config(), seed=7))
    pages = {"kv_page_tokens": 64, "kv_pages": PAGES} if request.param == "in pages" else {}
    with llmcl.load(
        str(folder), device=default_device.entry.index, max_context=384, chat_template=TEMPLATE, **pages
    ) as llm:
        yield llm


def elsewhere(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(timeout=60)


def ids(seed: int, n: int = 20) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 99, n)]


def answer(llm: LLM, seed: int, **options: Any) -> list[int]:
    return llm.generate(ids(seed), **GREEDY, **options).token_ids


# ---- threads -----------------------------------------------------------------------------------------------------


def test_threads_that_wait_or_try_again_get_the_answers_of_one_thread(llm: LLM) -> None:
    seeds = range(6)
    alone = [answer(llm, seed) for seed in seeds]
    rows = [llm.logits(ids(seed)) for seed in seeds]
    talk = [said(llm.chat(), str(n)) for n in range(2)]
    refused = 0

    def waiting() -> None:
        for seed in seeds:
            assert answer(llm, seed, wait=True) == alone[seed]

    def trying() -> None:
        nonlocal refused
        for seed in seeds:
            while True:
                try:
                    found = answer(llm, seed)
                    break
                except UsageError as error:
                    assert "another thread" in str(error)
                    refused += 1
                    time.sleep(0.001)
            assert found == alone[seed]

    def evaluating() -> None:
        for seed in seeds:
            np.testing.assert_array_equal(llm.logits(ids(seed), wait=True), rows[seed])

    def talking(n: int) -> None:
        chat = llm.chat()
        for _ in range(2):
            assert said(chat, str(n), wait=True) == talk[n]
            chat.fork(wait=True).reset(wait=True)
            chat.reset(wait=True)

    tasks = [waiting, waiting, trying, trying, evaluating, evaluating, lambda: talking(0), lambda: talking(1)]
    with ThreadPoolExecutor(len(tasks)) as pool:
        stream = llm.stream(ids(0), max_tokens=8)
        next(stream)
        running = [pool.submit(task) for task in tasks]
        until = time.monotonic() + 60
        while not refused and time.monotonic() < until:  # who does not wait is, while this answer is under way
            time.sleep(0.001)
        stream.close()
        for done in running:
            done.result(timeout=120)
    assert refused


def said(chat: llmcl.Chat, text: str, **options: Any) -> list[str]:
    """The answers of three turns."""
    return ["".join(p.text for p in chat.send(f"{text} {i}", **GREEDY, **options)) for i in range(3)]


def test_two_models_on_one_device_do_not_meet(default_device: Device, tmp_path: Path) -> None:
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(TINY_SHAPE))
    with ThreadPoolExecutor(1) as pool, llmcl.load_random(str(shape), device=default_device, seed=1) as one:

        def answers(llm: LLM) -> list[list[int]]:
            return [llm.generate(ids(seed), **GREEDY).token_ids for seed in range(10)]

        alone = answers(one)
        meanwhile = pool.submit(lambda: [answers(one) for _ in range(10)])
        with llmcl.load_random(str(shape), device=default_device, seed=2) as two:
            found = [answers(two) for _ in range(5)]
            assert meanwhile.result(timeout=60) == [alone] * 10
            assert found == [answers(two)] * 5 != [alone] * 5


def test_to_others_a_model_is_busy_while_an_answer_is_half_read(llm: LLM) -> None:
    alone = answer(llm, 1)
    stream = llm.stream(ids(2), max_tokens=50)
    chat = llm.chat()
    for use in (
        lambda: answer(llm, 1),
        lambda: llm.stream("text"),
        lambda: llm.logits([5]),
        llm.reset,
        chat.fork,
        lambda: chat.send("text"),
        lambda: llm.bench_prefill(5),
        lambda: llm.bench_decode(5),
        lambda: perplexity(llm, "text and more text", window=4),
    ):
        with pytest.raises(UsageError, match=BUSY):
            elsewhere(use)
    elsewhere(stream.close)
    assert next(stream, None) is None
    assert elsewhere(lambda: answer(llm, 1)) == alone


@pytest.mark.parametrize("how", ["read", "closed", "collected", "taken over"])
def test_who_waits_gets_the_model_when_the_answer_is_over(llm: LLM, how: str) -> None:
    alone = answer(llm, 1)
    stream = llm.stream(ids(2), max_tokens=4, ignore_eos=True)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: answer(llm, 1, wait=True))
        time.sleep(0.02)
        assert not waiting.done()
        if how == "read":
            assert len(list(stream)) == 3
        elif how == "closed":
            stream.close()
        elif how == "taken over":
            assert answer(llm, 1, wait=True) == alone
        del stream
        assert waiting.result(timeout=60) == alone


def test_an_answer_may_be_read_by_one_thread_after_another(llm: LLM) -> None:
    alone = answer(llm, 1)
    stream = elsewhere(lambda: llm.stream(ids(1), **GREEDY))
    assert [elsewhere(lambda: next(stream)).token_id for _ in range(4)] == alone[:4]
    with pytest.raises(UsageError, match=BUSY):
        llm.reset()
    assert next(stream).token_id == alone[4]
    stream = elsewhere(lambda: llm.stream(ids(2), max_tokens=50, ignore_eos=True))
    next(stream)
    assert answer(llm, 1, wait=True) == alone  # this thread read it last: it would wait for itself
    assert next(stream, None) is None


def test_a_call_from_within_an_answer_is_refused(llm: LLM) -> None:
    errors: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        for use in (lambda: llm.reset(wait=True), llm.close, lambda: llm.generate([5]), lambda: llm.chat().fork()):
            with pytest.raises(UsageError) as raised:
                use()
            errors.append(str(raised.value))

    alone = answer(llm, 1)
    assert answer(llm, 1, progress=progress) == alone
    assert errors and all("from within its own work" in error for error in errors), errors
    with pytest.raises(UsageError, match="from within its own work"):
        perplexity(llm, "text and more text", window=4, reference=llm)
    assert answer(llm, 1) == alone


def test_closing_ends_what_another_thread_generates(default_device: Device, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", small_config(), random_weights(small_config(), seed=7))
    for rests in (False, True):
        llm = llmcl.load(str(folder), device=default_device.entry.index)
        started, closed = threading.Event(), threading.Event()

        def read(llm: LLM = llm, started: Any = started, closed: Any = closed, rests: bool = rests) -> None:
            while True:  # however late the other thread closes
                for _ in llm.stream([5] * 20, max_tokens=400, ignore_eos=True):
                    started.set()
                    if rests:
                        closed.wait(60)

        with ThreadPoolExecutor(3) as pool:
            reading = pool.submit(read)
            assert started.wait(60)
            waiting = pool.submit(lambda llm=llm: llm.generate([5], wait=True))
            llm.close()
            closed.set()
            for refused in (reading, waiting):
                with pytest.raises(UsageError, match="was closed"):
                    refused.result(timeout=60)


def test_waiting_can_be_interrupted(llm: LLM) -> None:
    alone = answer(llm, 1)
    stream = elsewhere(lambda: llm.stream(ids(2), max_tokens=50))
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.05, _thread.interrupt_main).start()
        llm.reset(wait=True)
    stream.close()
    assert elsewhere(lambda: answer(llm, 1)) == alone


def test_a_turn_costs_little() -> None:
    """Below 2 us a token on an idle machine; a step of the demo model takes 3500."""
    lease = Leases("model").begin(lambda: range(20000))
    start = time.thread_time()
    for _ in lease:
        pass
    assert (time.thread_time() - start) / 20000 < 20e-6  # with room for a machine that does other things as well


# ---- conversations -----------------------------------------------------------------------------------------------


def test_a_reset_is_not_undone_by_an_answer_half_read(llm: LLM) -> None:
    chat = llm.chat()
    stream = chat.send("one", **GREEDY)
    assert any([next(stream).text, next(stream).text])
    chat.reset()
    assert next(stream, None) is None
    stream.close()
    assert chat.messages == []
    assert said(chat, "0") == said(llm.chat(), "0")


def test_the_next_turn_knows_of_an_answer_half_read(llm: LLM) -> None:
    chat, other = llm.chat(), llm.chat()
    first = chat.send("one", **GREEDY)
    part = next(first).text + next(first).text
    other.reset()
    fork = chat.fork()
    assert fork.messages == [] and next(first).text is not None
    list(chat.send("two", **GREEDY))
    first.close()
    assert [m["content"] for m in chat.messages][0::2] == ["one", "two"]
    assert chat.messages[1]["content"].startswith(part)


# ---- interrupts --------------------------------------------------------------------------------------------------

FILES = "engine/leases.py", "models/paged_kv_cache.py", "models/kv_cache.py", "engine/generation.py", "engine/chat.py"


class Lines:
    """A trace function: the lines of FILES that run, in order. Raises KeyboardInterrupt before number `at`."""

    def __init__(self, at: int = -1):
        self.at = at
        self.seen: list[tuple[str, int]] = []

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        file = Path(frame.f_code.co_filename)
        return self.line if f"{file.parent.name}/{file.name}" in FILES else None

    def line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.seen.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.seen) == self.at + 1:
                raise KeyboardInterrupt
        return self.line


def traced(work: Callable[[], object], at: int = -1) -> list[tuple[str, int]]:
    before, lines = sys.gettrace(), Lines(at)
    sys.settrace(lines)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return lines.seen


def test_an_interrupt_at_a_line_leaves_a_model_that_answers_right(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: None)  # interrupts in __del__
    question = "word " * 11
    talk, alone, in_pages = said(llm.chat(), question), answer(llm, 1), isinstance(llm.model.cache, PagedKVCache)

    def work() -> None:
        chat = llm.chat()
        stream = chat.send(question, **GREEDY)
        next(stream)
        fork = chat.fork()
        next(stream)
        list(fork.send("word " * 12, max_tokens=2))

    lines = traced(work)
    last = sorted({line: at for at, line in enumerate(lines)}.values())  # of each line, the time it runs last
    assert len(last) > (150 if in_pages else 120)
    chosen, reached = last[:: 2 if in_pages and is_full() else 8], 0
    for i, at in enumerate(chosen):
        reached += len(traced(work, at)) > at
        assert answer(llm, 1) == alone, lines[at]
        if i % 25 == 0:
            assert elsewhere(lambda: said(llm.chat(), question)) == talk, lines[at]
    # Which sequences of before are still there to be looked at, line by line, is up to the collector.
    assert reached > 0.8 * len(chosen)
    gc.collect()
    llm.reset()
    if isinstance(llm.model.cache, PagedKVCache):
        assert len(llm.model.cache.free()) == PAGES

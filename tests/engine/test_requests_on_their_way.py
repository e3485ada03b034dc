"""An engine with nothing to do waits a moment for requests that are on their way, so that they share its first step."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from fake_batch import FakeBatch, FakeLLM

from llmcl.engine import worker
from llmcl.engine.engine import Engine
from llmcl.engine.requests import Request

LONG_S = 60.0
TIMES_OUT_S = 20.0


class Counted:
    """An engine that takes up to 64 tokens a step. firsts: prompts that a step begins, of each step that begins one."""

    def __init__(self) -> None:
        self.batch = FakeBatch(n_pages=40, max_sequences=4)
        self.firsts: list[int] = []
        step = self.batch.step

        def counting(decode, chunks, before_sampling=None):  # type: ignore[no-untyped-def]
            self.firsts += [sum(chunk.sequence.position == 0 for chunk in chunks)] if chunks else []
            return step(decode, chunks, before_sampling)

        self.batch.step = counting  # type: ignore[method-assign]
        self.engine = Engine(FakeLLM(), lambda: self.batch, 64, wait=False)  # type: ignore[arg-type]

    def submit(self, seed: int, n_prompt: int = 10) -> Request:
        return self.engine.submit([seed] * n_prompt, max_tokens=3, ignore_eos=True)


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    monkeypatch.setattr(worker, "GATHER_S", LONG_S)
    monkeypatch.setattr(worker, "GATHER_ALL_S", LONG_S)
    tested = Counted()
    with tested.engine:
        yield tested


def test_requests_that_come_together_share_the_first_step(tested: Counted) -> None:
    come = [tested.engine.expect() for _ in range(3)]
    requests = []
    for seed, comes in enumerate(come):
        time.sleep(0.02)  # the engine would begin with the first of them
        requests.append(tested.submit(seed))
        comes()
    assert [len(request.result().token_ids) for request in requests] == [3, 3, 3]
    assert tested.firsts == [3]


def test_a_request_that_will_not_come_is_waited_for_no_longer(tested: Counted) -> None:
    comes, refused = tested.engine.expect(), tested.engine.expect()
    request = tested.submit(1)
    comes()
    time.sleep(0.02)
    assert not tested.firsts
    refused()
    refused()
    assert len(request.result().token_ids) == 3


@pytest.mark.parametrize(("n", "n_prompt"), [(4, 10), (2, 32), (1, 100)])
def test_a_full_step_waits_for_nobody(n: int, n_prompt: int, tested: Counted) -> None:
    """Of sequences, or of tokens."""
    tested.engine.expect()
    requests = [tested.submit(seed, n_prompt) for seed in range(n)]
    start = time.monotonic()
    assert [len(request.result().token_ids) for request in requests] == [3] * n
    assert time.monotonic() - start < TIMES_OUT_S


@pytest.mark.parametrize("limit", ["GATHER_S", "GATHER_ALL_S"])
def test_the_wait_is_short(limit: str, tested: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, limit, 0.01)
    tested.engine.expect()
    start = time.monotonic()
    assert len(tested.submit(1).result().token_ids) == 3
    assert time.monotonic() - start < TIMES_OUT_S


def test_closing_ends_the_wait(tested: Counted) -> None:
    tested.engine.expect()
    tested.submit(1)
    time.sleep(0.02)
    start = time.monotonic()
    tested.engine.close()
    assert time.monotonic() - start < TIMES_OUT_S

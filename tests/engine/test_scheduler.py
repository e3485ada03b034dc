"""The scheduler and its loop without a device: over random loads every request ends, undisturbed by the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from examples import examples
from fake_batch import PAGE, FakeBatch, answer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcl.engine.engine import STEP_TOKENS, tokens_beside
from llmcl.engine.generation import token_budget
from llmcl.engine.scheduler import Job, Plan, Scheduler
from llmcl.engine.step_loop import StepLoop
from llmcl.errors import UsageError
from llmcl.ops.logprobs import LogProb
from llmcl.ops.sample import SamplingParams


def prompt(n: int, seed: int = 0) -> list[int]:
    """The beginnings of prompts of one seed are the same."""
    return [(7 * i + 13 * seed + i * i % 11) % 131 for i in range(n)]


@dataclass
class Load:
    """A scheduler with its loop and what they did: ids by job, and every plan."""

    batch: FakeBatch
    scheduler: Scheduler
    loop: StepLoop
    ids: dict[Job, list[int]] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)

    def submit(
        self, prompt: list[int], max_tokens: int, *, seed: int = 0, priority: int = 0, top: int | None = None
    ) -> Job:
        budget = token_budget(self.scheduler.max_context, len(prompt), max_tokens)
        job = Job(prompt, SamplingParams(seed=seed), budget, priority, prompt_logprobs=top)
        self.scheduler.submit(job)
        self.ids[job] = []
        return job

    def step(self) -> None:
        """A step, after which everything is checked that holds after each."""
        for job, token, _ in self.loop.step():
            assert not job.done
            self.ids[job].append(token)
            if len(self.ids[job]) == job.max_tokens:
                self.scheduler.end(job)
        self.check()

    def check(self) -> None:
        scheduler, plan = self.scheduler, self.plans[-1]
        cache = scheduler.cache
        assert plan.n_rows <= (scheduler.max_step_tokens if plan.decode else scheduler.max_prompt_tokens)
        assert len(scheduler.running) <= scheduler.max_sequences
        held = [page for job in scheduler.running if job.sequence for page in job.sequence.pages]
        free = cache.free()
        assert sorted({*held, *free}) == sorted(cache.order) == list(range(len(cache.order)))
        assert not {*held} & {*free}
        assert all(job.sequence is None for job in scheduler.waiting)
        for job in scheduler.running:
            assert job.sequence is not None
            assert len(job.sequence.pages) <= -(-(job.sequence.position + 1) // PAGE) + 1
        for jobs in scheduler.waiting, scheduler.running:
            assert [job.rank for job in jobs] == sorted(job.rank for job in jobs)

    def run(self, most: int = 5000) -> None:
        """Until nothing is left to do."""
        for _ in range(most):
            if not self.loop.has_work:
                assert not self.batch.places and len(self.scheduler.cache.free()) == len(self.scheduler.cache.order)
                return
            self.step()
        raise AssertionError("it does not end")

    def check_answer(self, job: Job) -> None:
        """The ids so far are those of the request alone."""
        scored = job.prompt_logprobs is not None
        n, cell_tokens = len(self.ids[job]), self.batch.cell_tokens
        assert self.ids[job] == answer_of(job.prompt, job.params, n, cell_tokens, scored=scored)
        if n and job.prompt_logprobs is not None:
            top = [((token, 0.0),) * job.prompt_logprobs for token in job.prompt]
            found = [LogProb(token, -float(i), top[i]) for i, token in enumerate(job.prompt)]
            assert job.scored == [None, *found[1:]]


def load(
    n_pages: int = 40,
    max_sequences: int = 4,
    max_step_tokens: int = 64,
    max_prompt_tokens: int = 0,
    *,
    runs_ahead: bool = False,
    beside: Callable[[int], int] | None = None,
    **sizes: Any,
) -> Load:
    batch = FakeBatch(n_pages, max_sequences, runs_ahead=runs_ahead, **sizes)
    scheduler = Scheduler(
        batch.cache,
        max_sequences,
        max_step_tokens,
        batch.cell_tokens,
        max_prompt_tokens=max_prompt_tokens,
        tokens_beside=beside,
    )
    made = Load(batch, scheduler, StepLoop(batch, scheduler))
    plan = scheduler.plan

    def planned() -> Plan:
        made.plans.append(plan())
        return made.plans[-1]

    scheduler.plan = planned  # type: ignore[method-assign]
    return made


# ---- random loads ------------------------------------------------------------------------------------------------

JOBS = st.fixed_dictionaries(
    {
        "arrival": st.integers(0, 60),
        "n_prompt": st.integers(1, 300),
        "text": st.integers(0, 2),  # few, so that prompts begin alike
        "max_tokens": st.integers(1, 150),
        "priority": st.sampled_from([0, 0, 0, 1]),
        "top": st.sampled_from([None, None, 0, 2]),
        "cancelled_after": st.one_of(st.none(), st.none(), st.integers(0, 80)),
    }
)


@settings(max_examples=examples(200), derandomize=True, deadline=None)
@given(
    jobs=st.lists(JOBS, min_size=1, max_size=12),
    n_pages=st.integers(2, 24),
    max_sequences=st.integers(1, 6),
    spare_rows=st.integers(0, 80),
    runs_ahead=st.booleans(),
    cell_tokens=st.sampled_from([0, 0, 32, 64, 128]),
)
def test_over_random_loads_every_request_ends_as_if_alone(
    jobs: list[dict[str, Any]],
    n_pages: int,
    max_sequences: int,
    spare_rows: int,
    runs_ahead: bool,
    cell_tokens: int,
) -> None:
    rows = max_sequences + spare_rows + cell_tokens
    made = load(n_pages, max_sequences, rows, runs_ahead=runs_ahead, cell_tokens=cell_tokens)
    todo = sorted(jobs, key=lambda job: job["arrival"])
    cancelled: dict[Job, int] = {}
    for now in range(20000):
        while todo and todo[0]["arrival"] <= now:
            drawn = todo.pop(0)
            n_prompt = min(drawn["n_prompt"], made.scheduler.max_context)
            text, top = prompt(n_prompt, drawn["text"]), drawn["top"]
            job = made.submit(text, drawn["max_tokens"], seed=n_prompt, priority=drawn["priority"], top=top)
            if drawn["cancelled_after"] is not None:
                cancelled[job] = now + drawn["cancelled_after"]
        for job, when in cancelled.items():
            if when == now:
                pages_before = len(made.scheduler.cache.free())
                held = len(job.sequence.pages) if job.sequence is not None else 0
                made.scheduler.end(job)
                assert len(made.scheduler.cache.free()) >= pages_before
                assert held == 0 or job.sequence is None
        if made.loop.has_work:
            made.step()
        elif not todo:
            break
    else:
        raise AssertionError("it does not end")
    made.run()
    for job in made.ids:
        assert job.done
        made.check_answer(job)
        if job not in cancelled:
            assert len(made.ids[job]) == job.max_tokens


# ---- single properties -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_one_preempted_is_read_again_and_loses_nothing(runs_ahead: bool) -> None:
    made = load(n_pages=8, max_step_tokens=128, runs_ahead=runs_ahead)
    jobs = [made.submit(prompt(100, seed), 200, seed=seed) for seed in range(3)]
    made.run()
    assert made.scheduler.n_preempted
    for job in jobs:
        assert len(made.ids[job]) == 200
        made.check_answer(job)
    oldest = {chunk.job for plan in made.plans[10:] for chunk in plan.prefill}
    assert jobs[0] not in oldest, "the first to come was preempted"


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_pages_that_a_step_promises_are_there_for_all_of_it(runs_ahead: bool) -> None:
    made = load(n_pages=5, max_step_tokens=200, runs_ahead=runs_ahead)
    jobs = [made.submit(prompt(60, seed), 30) for seed in range(3)]
    made.step()
    assert len(made.scheduler.running) == 3  # each wants its second page in the same step
    made.run()
    assert made.scheduler.n_preempted == 1
    for job in jobs:
        assert len(made.ids[job]) == 30
        made.check_answer(job)


def test_running_streams_get_a_token_each_step_while_a_long_prompt_is_read() -> None:
    made = load(n_pages=40, max_step_tokens=32)
    streams = [made.submit(prompt(5, seed), 100) for seed in range(3)]
    made.step()
    long = made.submit(prompt(900, 9), 1)
    while not made.ids[long]:
        before = [len(made.ids[job]) for job in streams]
        made.step()
        assert [len(made.ids[job]) for job in streams] == [n + 1 for n in before]
        assert made.plans[-1].n_rows == 32 or made.ids[long]
    assert len(made.plans) == 1 + -(-900 // 29)


def test_a_step_in_which_nobody_decodes_may_read_more() -> None:
    made = load(max_step_tokens=32, max_prompt_tokens=100)
    jobs = [made.submit(prompt(n, n), 3) for n in (150, 60)]
    made.run()
    assert [plan.n_rows for plan in made.plans[:4]] == [100, 100, 11, 2]
    for job in jobs:
        made.check_answer(job)


@pytest.mark.parametrize("streams", [1, 4, 16, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 8, 32))])
def test_prompts_disturb_running_answers_little(streams: int) -> None:
    """By the rows of each step, and what so many took on a CPU (notes/cpu.md): the 99th percentile of the times of
    steps in which answers run is at most 2.5 times their median, with prompts in a fourth of them and in most.
    """
    decode_ms = [5.2, 5.1, 6.1, 11.0, 22.0, 42.0]  # of 1, 2, 4, .. rows
    prompt_row_ms = 0.95
    for every in (2, 40 + streams):  # steps between two prompts
        made = load(800, streams + 4, STEP_TOKENS, beside=tokens_beside)
        running = [made.submit(prompt(5, i), 900, seed=i) for i in range(streams)]
        while not all(made.ids[job] for job in running):
            made.step()
        first, n_prompts = len(made.plans), 0
        while len(made.plans) < first + 400:
            if len(made.plans) % every == 0 and len(made.scheduler.waiting) < 2:
                made.submit(prompt(60 + 40 * (n_prompts % 3), 100 + n_prompts), 2)
                n_prompts += 1
            made.step()
        times = []
        for plan in made.plans[first:]:
            n_chunk = plan.n_rows - len(plan.decode)
            of_decode = float(np.interp(len(plan.decode), [1, 2, 4, 8, 16, 32], decode_ms))
            times.append(of_decode + prompt_row_ms * n_chunk)
        assert n_prompts > 2 and all(len(plan.decode) >= streams for plan in made.plans[first:])
        assert np.percentile(times, 99) <= 2.5 * np.median(times)
        quiet = float(np.interp(streams, [1, 2, 4, 8, 16, 32], decode_ms))
        assert np.percentile(times, 99) <= 2.55 * quiet + 3  # further answers decode beside the streams


def test_first_come_first_served_and_the_higher_priority_first() -> None:
    made = load(max_sequences=1, max_step_tokens=64)
    late = [made.submit(prompt(20, n), 3, priority=n % 2) for n in range(6)]
    started = []
    while made.loop.has_work:
        made.step()
        started += made.plans[-1].started
    assert started == [*late[1::2], *late[0::2]]


def test_a_prompt_takes_the_pages_that_a_finished_one_left() -> None:
    made = load()
    first = made.submit(prompt(300), 10)
    made.run()
    assert made.batch.n_prefilled == 300
    second = made.submit([*prompt(290), 5], 10)
    made.run()
    assert made.batch.n_prefilled == 300 + 291 - 4 * PAGE
    made.check_answer(first)
    made.check_answer(second)


def test_a_prompt_takes_pages_of_one_that_is_still_being_read() -> None:
    made = load(max_step_tokens=64)
    jobs = [made.submit(prompt(300), 10) for _ in range(2)]
    made.run()
    assert made.batch.n_prefilled == 300 + 300 - 4 * PAGE
    for job in jobs:
        made.check_answer(job)


def test_pages_of_decoded_tokens_are_not_taken_where_a_batch_reads_in_cells() -> None:
    made = load(max_step_tokens=200, cell_tokens=PAGE)
    first = made.submit(prompt(70), 130)
    made.run()
    following = made.submit([*first.prompt, *made.ids[first]], 10)
    made.run()
    assert following.n_found == PAGE  # of 3 that the first text had filled
    made.check_answer(first)
    made.check_answer(following)


def test_the_cell_of_the_last_token_of_a_prompt_is_read_again() -> None:
    made = load(max_step_tokens=200, cell_tokens=PAGE)
    first = made.submit(prompt(2 * PAGE), 3)
    made.run()
    following = made.submit([*first.prompt, 5, 6], 3)
    made.run()
    assert following.n_found == PAGE
    made.check_answer(following)


def test_chunks_are_whole_cells() -> None:
    made = load(max_step_tokens=200, cell_tokens=96)
    stream = made.submit(prompt(5, 1), 30)
    made.step()
    made.submit(prompt(250), 3)
    made.run()
    chunks = [(chunk.position, len(chunk.token_ids)) for plan in made.plans[1:] for chunk in plan.prefill]
    assert chunks == [(0, 96), (96, 96), (192, 58)]
    assert [len(plan.prefill) for plan in made.plans[1:3]] == [2, 1]
    made.check_answer(stream)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("when", ["waiting", "reading", "decoding"])
def test_a_cancelled_request_frees_its_pages_at_once_and_its_place_with_the_next_step(
    when: str, runs_ahead: bool
) -> None:
    made = load(n_pages=20, max_sequences=2, max_step_tokens=40, runs_ahead=runs_ahead)
    others = [made.submit(prompt(30, n), 100) for n in range(2 if when == "waiting" else 1)]
    made.step()
    job = made.submit(prompt(200, 5), 100)
    for _ in range({"waiting": 2, "reading": 3, "decoding": 10}[when]):
        made.step()
    before = len(made.ids[job])
    assert (before > 0) == (when == "decoding")
    made.scheduler.end(job)
    assert len(made.scheduler.cache.free()) == 20 - sum(len(other.sequence.pages) for other in others if other.sequence)
    made.step()
    assert len(made.batch.places) == len(others)
    made.run()
    assert len(made.ids[job]) == before
    for other in others:
        made.check_answer(other)


def test_a_step_has_room_for_a_token_of_each_sequence() -> None:
    with pytest.raises(UsageError, match=r"max_step_tokens is 3 with 4 sequences"):
        load(max_sequences=4, max_step_tokens=3)


def test_a_pool_smaller_than_the_context_limits_an_answer() -> None:
    made = load(n_pages=2)
    assert made.scheduler.max_context == 128
    job = made.submit(prompt(100), 500)
    made.run()
    assert len(made.ids[job]) == 29

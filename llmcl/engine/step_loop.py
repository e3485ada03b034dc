"""The loop of an engine: has the device compute what the scheduler plans, and hands out the tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from llmcl.engine.alone import AloneSteps
from llmcl.engine.engine_metrics import EngineMetrics
from llmcl.engine.scheduler import Chunk, Job, Plan, Scheduler
from llmcl.engine.speculation import NO_SPECULATION, Speculation
from llmcl.engine.together import TogetherSteps
from llmcl.errors import LlmclError
from llmcl.grammar import masks_of
from llmcl.models.batch import PromptChunk
from llmcl.models.paged_kv_cache import PagedKVCache
from llmcl.models.sequence import SequenceState
from llmcl.ops.logprobs import LogProb
from llmcl.ops.sample import SamplingParams


class Batch(Protocol):
    """Sequences that are extended together on the device.

    max_sequences: places there. max_context: tokens of a sequence. max_rows: of a step. reads_together: else a
    step has rows that decode, or one chunk. max_draft_rows: of a step that verifies drafts of several sequences; 0:
    there is none. runs_ahead: the next step is to be enqueued before the ids of the last one are read. cell_tokens: 0,
    or a row has the same bits whatever else a step has, if prompts are read in cells of so many tokens, counted from
    the beginning, each in a step of its own.
    """

    @property
    def max_sequences(self) -> int: ...
    @property
    def cache(self) -> PagedKVCache: ...
    @property
    def max_context(self) -> int: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def reads_together(self) -> bool: ...
    @property
    def max_draft_rows(self) -> int: ...
    @property
    def runs_ahead(self) -> bool: ...
    @property
    def cell_tokens(self) -> int: ...
    def start(self, sequence: SequenceState, params: SamplingParams) -> None:
        """Gives the sequence a place. Its next token is number sequence.n_sampled that `params` chooses."""

    def step(
        self,
        decode: Sequence[SequenceState],
        chunks: Sequence[PromptChunk],
        before_sampling: Callable[[], None] | None = None,
    ) -> Callable[[], list[int]]:
        """Extends each of `decode` by its last sampled token and the others by chunks of their prompts, and samples
        what follows: for `decode`, then for the last chunks. The function returned waits for the ids.

        before_sampling: called while the device computes what the choice of the tokens follows.
        """
        ...

    def allow(self, tokens: Mapping[SequenceState, np.ndarray | None]) -> None:
        """The next tokens of these sequences are of these, masks as of `LogitBias.allow`; None: all may come."""

    def verify(
        self, sequence: SequenceState, enqueue: Callable[[SequenceState], Callable[[], list[int]]]
    ) -> Callable[[], list[int]]:
        """A step that `enqueue` enqueues, of several rows of a sequence that is alone; waits for the tokens sampled."""
        ...

    def verify_drafts(self, drafts: Sequence[tuple[SequenceState, Sequence[int]]]) -> Callable[[], list[list[int]]]:
        """A step of several sequences, each with the rows of its draft, which may be empty; waits for their tokens."""
        ...

    def logprobs(self, sequences: Sequence[SequenceState]) -> Callable[[], list[LogProb | None]]:
        """Right after the call that sampled for these: log-probabilities of the tokens. The function returned waits."""
        ...

    def prepare_scores(self) -> None:
        """Makes `score` ready. Raises OutOfDeviceMemoryError where there is no room for it."""

    def score(
        self, sequence: SequenceState, token_ids: Sequence[int], following: Sequence[int], top: int
    ) -> Callable[[], list[LogProb]]:
        """Reads tokens of a prompt in a step of its own. The function returned waits for the log-probability of the
        token that follows each of them, with `top` alternatives."""
        ...

    def end(self, sequence: SequenceState) -> None:
        """Takes the place back."""


class Sampled(NamedTuple):
    """A token of a job's answer."""

    job: Job
    token: int
    logprob: LogProb | None


@dataclass(frozen=True)
class Reading:
    """What a step samples for these jobs; both functions wait. Of each it is one token, or of a draft that is verified
    one or several. n_rows: of each job's draft and one more; 0 or 1: it has no draft; (): nobody has.
    """

    jobs: list[Job]
    tokens: Callable[[], list[list[int]]]
    logprobs: Callable[[], Sequence[LogProb | None]]
    n_rows: Sequence[int] = ()


@dataclass(frozen=True)
class PromptReading:
    """The log-probabilities of the tokens behind those that a step reads of a prompt, from `position` on; waits."""

    job: Job
    position: int
    logprobs: Callable[[], list[LogProb]]


class StepLoop:
    """One step after the other; on a device that runs ahead the ids come a step late.

    A sampled token is appended to its sequence once the step that takes it as input is enqueued and its id is known.
    Of jobs with a matcher the token is chosen once the ids of the step before are read and the mask is known. That is
    while the device computes the step itself, which needs neither.
    """

    def __init__(self, batch: Batch, scheduler: Scheduler, speculation: Speculation = NO_SPECULATION):
        self._batch = batch
        self._scheduler = scheduler
        self._alone = AloneSteps(batch, speculation)
        self._together = TogetherSteps(batch, *speculation.for_several)
        self._readings: list[Reading | PromptReading] = []  # of the step under way
        self._known: list[Sampled] = []
        self._failed: dict[Job, LlmclError] = {}
        self.metrics = EngineMetrics()

    @property
    def cache(self) -> PagedKVCache:
        return self._batch.cache

    @property
    def cell_tokens(self) -> int:
        return self._batch.cell_tokens

    @property
    def has_work(self) -> bool:
        return bool(self._readings) or self._scheduler.has_work

    @property
    def has_room(self) -> bool:
        """Whether a step with those that wait now would have room for a further prompt."""
        return self._scheduler.has_room

    def submit(self, job: Job) -> None:
        """Has the job wait for its turn. Raises OutOfDeviceMemoryError where what it wants needs more than there is."""
        if job.n_scored:
            self._batch.prepare_scores()
        job.submitted_ns = time.perf_counter_ns()
        self._scheduler.submit(job)

    def end(self, job: Job) -> None:
        self._scheduler.end(job)

    def step(self) -> list[Sampled]:
        """Enqueues a step; returns the tokens known now, of jobs that go on. The caller ends those that do not.

        A job's tokens come in order, several at once where a draft was verified. Then the next step is enqueued in the
        call that follows.
        """
        start = time.perf_counter()
        if self._readings and (self._alone.must_be_read or self._together.must_be_read):
            self._read_all()
            return self._known_since(start)
        self._alone.give_back()
        self._together.give_back()
        plan = self._scheduler.plan()
        self._count(plan)
        enqueued = self._enqueue(plan)
        for job in plan.decode:
            _append_inputs(job)  # of which the ids are known where no step was under way
        if self._batch.runs_ahead:
            self._read_all()
            self._readings = enqueued
        else:
            self._readings = enqueued
            self._read_all()
        return self._known_since(start)

    def _known_since(self, start: float) -> list[Sampled]:
        """The tokens that became known, at the end of a call of `step` that began at `start`."""
        known, self._known = self._known, []
        self.metrics.step_s += time.perf_counter() - start
        return known

    def failures(self) -> dict[Job, LlmclError]:
        """Jobs whose matchers failed since this was called last. The caller ends them."""
        failed, self._failed = self._failed, {}
        return failed

    def _count(self, plan: Plan) -> None:
        metrics = self.metrics
        metrics.preemptions = self._scheduler.n_preempted
        if plan.n_rows:
            metrics.steps += 1
            metrics.step_rows.observe(plan.n_rows)
            metrics.step_keys += plan.n_keys
            metrics.step_sequences += len(plan.decode) + len(plan.prefill)
        metrics.prompt_tokens += sum(len(chunk.token_ids) for chunk in plan.prefill)

    def _begin(self, job: Job) -> None:
        """The job leaves the queue; not once more after a preemption."""
        if job.begun_ns is None:
            job.begun_ns = time.perf_counter_ns()
            self.metrics.queue_s.observe((job.begun_ns - (job.submitted_ns or job.begun_ns)) / 1e9)
            self.metrics.cached.observe(job.n_found)

    def _enqueue(self, plan: Plan) -> list[Reading | PromptReading]:
        batch = self._batch
        for sequence in plan.ended:
            batch.end(sequence)
        for job in plan.started:
            self._begin(job)
            batch.start(_sequence(job), job.params)
        drafted = self._drafted(plan)
        read = [chunk for chunk in plan.prefill if chunk.following is None]
        readings: list[Reading | PromptReading] = [*drafted]
        readings += [self._scoring(chunk) for chunk in plan.prefill if chunk.following is not None]
        steps = [([] if drafted else plan.decode, read)]
        if batch.cell_tokens or not batch.reads_together:
            steps = [(steps[0][0], []), *(([], [chunk]) for chunk in read)]
        for decode, prefill in steps:
            if decode or prefill:
                chunks = [PromptChunk(_sequence(chunk.job), chunk.token_ids, chunk.is_last) for chunk in prefill]
                jobs = [*decode, *(chunk.job for chunk in prefill if chunk.is_last)]
                wait = batch.step([_sequence(job) for job in decode], chunks, self._masking(jobs))
                wait = self._together.decoded(plan, wait)
                if jobs:
                    readings.append(self._reading(jobs, wait))
        return readings

    def _scoring(self, chunk: Chunk) -> PromptReading:
        job = chunk.job
        assert chunk.following is not None and job.prompt_logprobs is not None
        found = self._batch.score(_sequence(job), chunk.token_ids, chunk.following, job.prompt_logprobs)
        return PromptReading(job, chunk.position, found)

    def _drafted(self, plan: Plan) -> list[Reading]:
        """The step of a plan as speculation has it, if it is a matter of that."""
        jobs = [*plan.decode]
        alone = self._alone.enqueue(plan)
        if alone is not None:
            return [Reading(jobs, lambda: [alone.tokens()], lambda: [None], [alone.n_rows])]
        together = self._together.enqueue(plan)
        if together is None:
            return []
        n_rows, tokens = together
        return [Reading(jobs, tokens, lambda: [None] * len(jobs), n_rows)]

    def _reading(self, jobs: list[Job], wait: Callable[[], list[int]]) -> Reading:
        def tokens() -> list[list[int]]:
            return [[token] for token in wait()]

        if all(job.params.logprobs is None for job in jobs):
            return Reading([*jobs], tokens, lambda: [None] * len(jobs))
        return Reading([*jobs], tokens, self._batch.logprobs([_sequence(job) for job in jobs]))

    def _masking(self, jobs: list[Job]) -> Callable[[], None] | None:
        """What has the next tokens of these jobs chosen from those that may come; None where all may."""
        if all(job.matcher is None for job in jobs):
            return None

        def mask() -> None:
            self._read_all()
            matching = [(job, job.matcher) for job in jobs if not job.done and job not in self._failed]
            waiting = [(job, matcher) for job, matcher in matching if matcher is not None]
            allowed: dict[SequenceState, np.ndarray | None] = {}
            masks = masks_of([matcher for _, matcher in waiting])
            for (job, _), tokens in zip(waiting, masks, strict=True):
                if isinstance(tokens, LlmclError):
                    self._fail(job, tokens)
                else:
                    allowed[_sequence(job)] = tokens
            if allowed:
                self._batch.allow(allowed)

        return mask

    def _read_all(self) -> None:
        """Takes the ids of the step under way, as soon as they are there."""
        readings, self._readings = self._readings, []
        for reading in readings:
            if isinstance(reading, PromptReading):
                first, found = reading.position + 1, reading.logprobs()
                reading.job.scored[first : first + len(found)] = found
                continue
            jobs, tokens, logprobs = reading.jobs, reading.tokens(), reading.logprobs()
            n_rows = reading.n_rows or [0] * len(jobs)
            for job, of_job, logprob, rows in zip(jobs, tokens, logprobs, n_rows, strict=True):
                if rows > 1 and not job.done:
                    job.note_verified(rows, len(of_job))
                    self.metrics.note_draft(rows - 1, len(of_job) - 1)
                for token in of_job:
                    self._take(job, token, logprob)

    def _take(self, job: Job, token: int, logprob: LogProb | None) -> None:
        """A token of a job is known."""
        if job.done or job in self._failed:
            return
        if not job.sampled and job.begun_ns is not None:
            self.metrics.prompt_s += (time.perf_counter_ns() - job.begun_ns) / 1e9
        job.sampled.append(token)
        self._alone.push(job, token)
        _append_inputs(job)
        if len(job.sampled) > job.n_given:  # else the caller has it
            self._known.append(Sampled(job, token, logprob))
        try:
            if job.matcher is not None:
                job.matcher.accept([token])
        except LlmclError as error:
            self._fail(job, error)

    def _fail(self, job: Job, error: LlmclError) -> None:
        """The job gets no more tokens; what the step under way samples for it is thrown away."""
        self._failed[job] = error


def _sequence(job: Job) -> SequenceState:
    assert job.sequence is not None
    return job.sequence


def _append_inputs(job: Job) -> None:
    """Appends the inputs of the steps enqueued so far, whose ids are known now: all but the token sampled last."""
    if job.sequence is not None:
        n_held = job.sequence.position - len(job.prompt)
        assert n_held >= 0
        job.sequence.token_ids += job.sampled[n_held : job.n_enqueued - 1]
